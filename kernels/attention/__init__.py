"""Attention for MiniMax H3 on views of the projection buffer: a registry of backends, guards before every launch, choice by measurement.

``plan(choice, stock)`` decides once per run; ``plan(q, k, v)`` then takes ``[1, S, H, D]`` views and gives token-major ``[S, H*D]``.
"""

from .backend import EXACTNESS, AttentionUnavailable
from .environment import Environment
from .planning import Host, Plan, insist, plan
from .registry import CHOICES, FASTEST, STOCK

__all__ = ["CHOICES", "EXACTNESS", "FASTEST", "STOCK", "AttentionUnavailable", "Environment", "Host", "Plan", "insist", "plan"]
