"""The front door behind ``run.py``: finding ComfyUI, making an environment, driving a server, running the tests.

Nothing here is imported by the nodes, and nothing here imports torch or ComfyUI at module level: ``run.py`` starts on
a bare Python. Only :mod:`client` needs a package (aiohttp); it runs under the Python that runs ComfyUI.
"""
