"""H3 Sampler in a real ComfyUI: the bytes of core's samplers, the two clocks, noise, masks and guiders."""

import pytest
import torch
from h3_vortex.tests.host import sampling

STEPS = 3


@pytest.fixture(scope="module")
def model(comfy):
    with torch.inference_mode():
        return comfy.sd.load_diffusion_model(str(comfy.models / "diffusion_models" / "minimax_h3_tiny_pruned_bf16.safetensors"))


def make(name, eta=0.0):
    from h3_vortex.nodes.sampler import make_sampler

    return make_sampler(name, eta)


def node(model, **more):
    from h3_vortex.nodes.sampler import H3VortexSampler

    given = {"sampler": "turbo_euler", "schedule": "turbo", "steps": 4, "shift_video": 0.0, "shift_audio": 0.0, "eta": 0.0} | more
    return H3VortexSampler.execute(model, **given).result


def run(model, sampler, sigmas, seed=7, mask=None, noise=None, latent=None, guider=None):
    """(the two latents, the latent dict that went in)"""
    from comfy_extras.nodes_custom_sampler import BasicGuider, RandomNoise, SamplerCustomAdvanced
    from comfy_extras.nodes_minimax_h3 import EmptyMiniMaxH3LatentAV

    with torch.inference_mode():
        latent = latent or EmptyMiniMaxH3LatentAV.execute(64, 64, 5).result[0]
        if mask is not None:
            latent["noise_mask"] = mask
        guider = guider or BasicGuider.execute(model, sampling.conditioning()).result[0]
        noise = noise or RandomNoise.execute(seed).result[0]
        out = SamplerCustomAdvanced.execute(noise, guider, sampler, sigmas, latent).result[0]
        return [stream.clone() for stream in out["samples"].unbind()]


def core_sigmas(model, schedule, steps):
    import comfy.samplers

    return comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), schedule, steps)


@pytest.mark.parametrize("name, schedule", [("euler", "simple"), ("res_multistep", "beta")])
def test_one_clock_without_noise_is_core_byte_for_byte(comfy, model, name, schedule):
    sampler, sigmas, same_model, info = node(model, sampler=name, schedule=schedule, steps=STEPS)
    assert same_model is model and f"{name}, {schedule}, {STEPS} steps, shifts 12/3, eta 0" in info
    assert torch.equal(sigmas, core_sigmas(model, schedule, STEPS))
    core = comfy.samplers.sampler_object(name)
    mask = torch.ones(1, 1, 2, 4, 4)
    mask[..., :2, :] = 0
    for more in ({}, {"mask": mask}):
        assert sampling.same(run(model, sampler, sigmas, **more), run(model, core, sigmas, **more))


def test_turbo_grid_is_core_simple_where_core_can_make_it(model):
    *_, = node(model)
    for steps in (4, 8):
        _, sigmas, _, _ = node(model, steps=steps)
        assert torch.allclose(sigmas, core_sigmas(model, "simple", steps), rtol=0, atol=2e-7)
    # 1000 timesteps do not divide by 6: only the turbo schedule is on the official grid there
    assert float((node(model, steps=6)[1] - core_sigmas(model, "simple", 6)).abs().max()) > 1e-5


@pytest.mark.parametrize("shifts", [(0.0, 0.0), (6.0, 3.0)])
def test_turbo_euler_steps_core_s_velocities_like_the_official_scheduler(comfy, model, shifts):
    # the model is core's, sampled through core's guider; its native velocities are recorded and stepped by diffusers' two schedulers
    from comfy.patcher_extension import WrappersMP

    scheduling = pytest.importorskip("diffusers.schedulers.scheduling_minimax_h3")
    sampler, sigmas, shifted, info = node(model, shift_video=shifts[0], shift_audio=shifts[1])
    video_shift = shifts[0] or 12.0
    assert f"shifts {video_shift:g}/3" in info
    seen = []

    def record(executor, x, timestep, *args, **kwargs):
        out = executor(x, timestep, *args, **kwargs)
        seen.append(([s.clone() for s in x], float(timestep.flatten()[0]) / 1000, [s.clone() for s in out]))
        return out

    watched = shifted.clone()
    watched.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "test", record)
    finished = run(watched, sampler, sigmas)
    assert len(seen) == 4
    for stream, shift in enumerate((video_shift, 3.0)):
        clock = scheduling.MiniMaxH3Scheduler(shift)
        clock.set_timesteps(5)
        state = seen[0][0][stream]
        for i, (states, sigma, velocity) in enumerate(seen):
            assert sigma == pytest.approx(float(sigmas[i]), abs=1e-6)
            assert torch.allclose(states[stream], state, rtol=0, atol=2e-5)  # what the model saw is the native state
            state = clock.step(-velocity[stream], clock.timesteps[i], state).prev_sample
        assert torch.allclose(finished[stream], state, rtol=0, atol=2e-5)


def test_turbo_euler_is_core_euler_up_to_rounding(comfy, model):
    # an Euler step does not depend on the clock (tests/unit/test_samplers.py); through the whole host too
    sampler, sigmas, _, _ = node(model)
    for mine, theirs in zip(run(model, sampler, sigmas), run(model, comfy.samplers.sampler_object("euler"), sigmas), strict=True):
        assert float((mine - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())


@pytest.mark.parametrize("name", ["turbo_euler", "euler", "res_multistep", "res_2s"])
def test_noise_is_seeded_and_finite(model, name):
    sigmas = node(model, steps=STEPS)[1]
    plain = run(model, make(name), sigmas)
    once, again, other = (run(model, make(name, 0.5), sigmas, seed=seed) for seed in (7, 7, 8))
    assert sampling.same(once, again) and not sampling.same(once, other) and not sampling.same(once, plain)
    assert all(bool(torch.isfinite(s).all()) for s in once)
    if name == "res_2s":
        assert not sampling.same(plain, run(model, make("euler"), sigmas))


def test_split_sigmas_and_a_given_latent(comfy, model):
    # the pack at a split belongs to the video's clock, as with core's samplers: two halves make the whole
    from comfy_extras.nodes_custom_sampler import DisableNoise

    sampler, sigmas, _, _ = node(model)
    whole = run(model, sampler, sigmas)
    with torch.inference_mode():
        first = run(model, sampler, sigmas[:3])
        from comfy.nested_tensor import NestedTensor

        (none,) = DisableNoise.execute().result
        second = run(model, sampler, sigmas[2:], noise=none, latent={"samples": NestedTensor([s.clone() for s in first])})
    for mine, theirs in zip(second, whole, strict=True):
        assert float((mine - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())


def test_given_latents_noise_and_sigmas_are_not_written_to(model):
    from comfy_extras.nodes_custom_sampler import RandomNoise
    from comfy_extras.nodes_minimax_h3 import EmptyMiniMaxH3LatentAV

    class Noise:
        seed = 7

        def generate_noise(self, latent):
            self.given = RandomNoise.execute(7).result[0].generate_noise(latent)
            self.copy = [s.clone() for s in self.given.unbind()]
            return self.given

    with torch.inference_mode():
        latent = EmptyMiniMaxH3LatentAV.execute(64, 64, 5).result[0]
        streams = [s.clone() for s in latent["samples"].unbind()]
        sigmas = node(model, steps=STEPS)[1]
        grid = sigmas.clone()
        noise = Noise()
        for name in ("turbo_euler", "res_2s"):
            run(model, make(name, 0.2), sigmas, noise=noise, latent=latent)
            assert sampling.same(list(latent["samples"].unbind()), streams) and torch.equal(sigmas, grid)
            assert sampling.same(list(noise.given.unbind()), noise.copy)


def test_cfg_guider_and_a_conflicting_sampling_node(comfy, model):
    from comfy_extras.nodes_custom_sampler import CFGGuider

    sampler, sigmas, _, _ = node(model, steps=STEPS)
    with torch.inference_mode():
        (guider,) = CFGGuider.execute(model, sampling.conditioning(), sampling.conditioning(seed=3), 3.0).result
    out = run(model, sampler, sigmas, guider=guider)
    assert not sampling.same(out, run(model, sampler, sigmas))
    wrong = model.clone()
    wrong.model_options["transformer_options"]["minimax_h3_sigma_shift_video"] = 6.0
    with pytest.raises(ValueError, match="carries its sound by 4, its shifts 6/3 say 2"):
        run(wrong, sampler, sigmas)
