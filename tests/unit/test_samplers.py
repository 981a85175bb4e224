"""The samplers against diffusers' scheduler, against exact solutions, and the rules they keep (nothing given is written to)."""

import functools
import math

import pytest
import torch
from h3_vortex.h3 import samplers, sigmas

VIDEO, AUDIO = 24 * 2 * 4 * 4, 32 * 2 * 9
CASES = [(4, 12.0, 3.0), (8, 12.0, 3.0), (4, 6.0, 3.0), (8, 6.0, 3.0), (6, 12.0, 3.0), (20, 12.0, 3.0)]


def noise(n, seed):
    return torch.randn(1, 1, n, generator=torch.Generator("cpu").manual_seed(seed))


def field(n, seed):
    """A velocity ``v(x, sigma)`` toward noise, bounded and different for every element."""
    scale, shift = noise(n, seed).abs() + 0.3, noise(n, seed + 1)
    return lambda x, sigma: torch.tanh(scale * x + shift * (1 - sigma)) + 0.1 * x


class CarriedModel:
    """Core's forward (``comfy.ldm.minimax.model.MiniMaxH3Model.forward``) around two native velocity fields, as the sampler sees it."""

    def __init__(self, shift_video, shift_audio, dtype=torch.float32):
        self.shift_video, self.shift_audio = shift_video, shift_audio
        self.video, self.audio = field(VIDEO, 10), field(AUDIO, 20)
        self.seen = []
        self.dtype = dtype

    def velocities(self, video, sigma_video, audio, sigma_audio):
        return self.video(video, sigma_video), self.audio(audio, sigma_audio)

    def __call__(self, pack, sigma):
        scale = self.shift_video / self.shift_audio
        video, carried = pack[..., :VIDEO], pack[..., VIDEO:]
        sigma_audio = sigmas.change_shift(sigma, self.shift_video, self.shift_audio).to(sigma.dtype)
        audio = carried * (sigma_audio / sigma)
        self.seen.append((video, float(sigma), audio, float(sigma_audio)))
        v, a = self.velocities(video, sigma, audio, sigma_audio)
        a = (1 - scale) * audio + (1 + (scale - 1) * sigma_audio) * a
        return torch.cat([video - sigma * v, carried - sigma * a], dim=-1)


def official(model, steps, video, audio):
    """diffusers' two schedulers stepping the same velocities; it predicts toward data, hence the sign."""
    scheduling = pytest.importorskip("diffusers.schedulers.scheduling_minimax_h3")
    clocks = [scheduling.MiniMaxH3Scheduler(shift) for shift in (model.shift_video, model.shift_audio)]
    for clock in clocks:
        clock.set_timesteps(steps + 1)
    for i in range(steps):
        v, a = model.velocities(video, clocks[0].sigmas[i], audio, clocks[1].sigmas[i])
        video = clocks[0].step(-v, clocks[0].timesteps[i], video).prev_sample
        audio = clocks[1].step(-a, clocks[1].timesteps[i], audio).prev_sample
    return video, audio


@pytest.mark.parametrize("steps, shift_video, shift_audio", CASES)
def test_turbo_euler_is_the_official_scheduler_on_both_streams(steps, shift_video, shift_audio):
    model = CarriedModel(shift_video, shift_audio)
    video, audio = noise(VIDEO, 1), noise(AUDIO, 2)
    expected = official(model, steps, video, audio)
    grid = sigmas.turbo(steps, shift_video)
    parts = samplers.streams(grid, [VIDEO, AUDIO], shift_video, shift_audio)
    pack = samplers.turbo_euler(model, torch.cat([video, audio], dim=-1), parts)
    got = pack[..., :VIDEO], pack[..., VIDEO:] / (shift_video / shift_audio)
    # both compute in fp32, in other orders: a few ulp for each of the steps
    for mine, theirs in zip(got, expected, strict=True):
        assert float((mine - theirs).abs().max()) < 4 * steps * torch.finfo(torch.float32).eps * float(theirs.abs().max())
    assert len(model.seen) == steps


def test_the_model_sees_the_native_states_at_their_own_sigmas():
    model = CarriedModel(12.0, 3.0)
    grid = sigmas.turbo(4, 12.0)
    samplers.turbo_euler(model, torch.cat([noise(VIDEO, 1), noise(AUDIO, 2)], dim=-1), samplers.streams(grid, [VIDEO, AUDIO], 12.0, 3.0))
    assert [round(s[1], 4) for s in model.seen] == [1, 0.9730, 0.9231, 0.8]
    assert [round(s[3], 4) for s in model.seen] == [1, 0.9, 0.75, 0.5]


@pytest.mark.parametrize("shift_video, shift_audio", [(12.0, 3.0), (6.0, 3.0), (6.0, 6.0), (7.0, 2.5)])
def test_euler_is_the_same_step_on_either_clock(shift_video, shift_audio):
    # the carry is linear in sigma_v, so an Euler step on the carried sound is the native one; only roundings differ
    model, grid = CarriedModel(shift_video, shift_audio), sigmas.turbo(4, shift_video)
    x = torch.cat([noise(VIDEO, 1), noise(AUDIO, 2)], dim=-1)
    two = samplers.turbo_euler(model, x, samplers.streams(grid, [VIDEO, AUDIO], shift_video, shift_audio))
    one = samplers.euler(model, x, grid)
    assert float((two - one).abs().max()) < 32 * torch.finfo(torch.float32).eps * float(one.abs().max())


def test_the_carried_clean_estimate_is_the_native_one_times_the_scale():
    # the identity on which turbo_euler stands, in float64 against core's formula
    model = CarriedModel(12.0, 3.0)
    for sigma in (0.9999, 0.8, 0.1, 1e-3):
        s = torch.tensor(sigma, dtype=torch.float64)
        pack = torch.cat([noise(VIDEO, 1), noise(AUDIO, 2)], dim=-1).double()
        denoised = model(pack, s)[..., VIDEO:]
        _, _, audio, sigma_audio = model.seen[-1]
        clean = audio - sigma_audio * model.audio(audio, torch.tensor(sigma_audio, dtype=torch.float64))
        assert torch.allclose(denoised, 4.0 * clean, rtol=1e-11, atol=1e-11)


def test_video_alone():
    model = field(VIDEO, 10)
    grid = sigmas.turbo(4, 12.0)
    out = samplers.turbo_euler(
        lambda x, s: x - s * model(x, s), noise(VIDEO, 1), samplers.streams(grid, [VIDEO], 12.0, 3.0))
    assert out.shape == (1, 1, VIDEO) and bool(torch.isfinite(out).all())


# -- order of the one-clock methods ------------------------------------------------------------------------------------------------------


@functools.cache
def solve(name, steps):
    """The solution at sigma 0.25 from sigma 0.9 of a smooth field."""
    model = field(64, 3)
    grid = torch.linspace(math.log(0.9), math.log(0.25), steps + 1, dtype=torch.float64).exp()
    return samplers.ONE_CLOCK[name](lambda x, s: x - s * model(x, s), noise(64, 5).double(), grid)


@pytest.mark.parametrize("name, order", [("euler", 1), ("res_multistep", 2), ("res_2s", 2)])
def test_order_of_convergence(name, order):
    errors = [float((solve(name, steps) - solve("res_2s", 1024)).abs().max()) for steps in (16, 32, 64)]
    measured = math.log2(errors[0] / errors[2]) / 2
    assert order - 0.25 < measured < order + 0.5, (errors, measured)


@pytest.mark.parametrize("name", samplers.NAMES)
def test_a_perfect_model_is_followed_to_its_target(name):
    target = torch.cat([noise(VIDEO, 7), noise(AUDIO, 8)], dim=-1)
    grid = sigmas.turbo(4, 12.0)
    carried = torch.cat([target[..., :VIDEO], target[..., VIDEO:] * 4], dim=-1)
    x = torch.cat([noise(VIDEO, 1), noise(AUDIO, 2)], dim=-1)
    out = run(name, lambda x, s: carried, x, grid)
    assert torch.allclose(out, carried, rtol=0, atol=1e-6)


def run(name, denoise, x, grid, **more):
    if name == "turbo_euler":
        return samplers.turbo_euler(denoise, x, samplers.streams(grid, [VIDEO, AUDIO], 12.0, 3.0), **more)
    return samplers.ONE_CLOCK[name](denoise, x, grid, **more)


# -- noise -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", samplers.NAMES)
@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_noise_leaves_every_stream_at_its_own_level(name, eta):
    # a perfect model: what is not clean is noise, and its level after the step must be the grid's, in the native scale of each stream
    count = 4096
    generator = torch.Generator("cpu").manual_seed(3)
    grid = torch.tensor([0.95, 0.8], dtype=torch.float32)
    audio = sigmas.change_shift(grid, 12.0, 3.0)
    carry = sigmas.carry(grid.double(), audio, 12.0, 3.0)
    target = torch.full((1, 1, 2 * count), 0.5)
    start = torch.randn(1, 1, 2 * count, generator=generator)
    native = torch.cat([
        (1 - grid[0]) * target[..., :count] + grid[0] * start[..., :count],
        (1 - audio[0].float()) * target[..., count:] + audio[0].float() * start[..., count:]], dim=-1)  # fmt: skip
    x = native.clone()
    x[..., count:] *= carry[0].float()
    clean = target.clone()
    clean[..., count:] *= 4
    more = {"eta": eta, "noise": lambda a, b: torch.randn(1, 1, 2 * count, generator=generator)}
    if name == "turbo_euler":
        out = samplers.turbo_euler(lambda x, s: clean, x, samplers.streams(grid, [count, count], 12.0, 3.0), **more)
    else:
        out = samplers.ONE_CLOCK[name](lambda x, s: clean, x, grid, **more)
    for level, values in ((float(grid[1]), out[..., :count]), (float(audio[1]), out[..., count:] / float(carry[1]))):
        rest = values - (1 - level) * 0.5
        # the standard deviation of 4096 normal values is known to 1.1 %, 5 standard errors allowed
        assert float(rest.std()) == pytest.approx(level, rel=5 * (2 * count) ** -0.5)
        assert abs(float(rest.mean())) < 5 * level * count**-0.5


def test_down_step_without_noise_is_the_grid():
    sigma = torch.tensor([0.9, 0.5, 0.0])
    assert samplers.down_step(sigma[0], sigma[1], 0.0) == (sigma[1], None, None)
    assert samplers.down_step(sigma[1], sigma[2], 1.0) == (sigma[2], None, None)


# -- rules -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [0.0, 0.5])
@pytest.mark.parametrize("name", samplers.NAMES)
def test_nothing_given_is_written_to(name, eta):
    model, given = CarriedModel(12.0, 3.0), []

    def keep(tensor):
        given.append((tensor, tensor.clone()))
        return tensor

    def on_step(i, x, sigma, denoised):
        keep(x)

    x = keep(torch.cat([noise(VIDEO, 1), noise(AUDIO, 2)], dim=-1))
    generator = torch.Generator("cpu").manual_seed(0)
    out = run(
        name, lambda x, s: keep(model(keep(x), s)), x, keep(sigmas.turbo(4, 12.0)), eta=eta,
        noise=lambda a, b: keep(torch.randn(x.shape, generator=generator)), on_step=on_step)  # fmt: skip
    assert all(torch.equal(tensor, copy) for tensor, copy in given) and len(given) > 12
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("name", samplers.NAMES)
def test_callback_counts_steps_and_calls(name):
    model, steps = CarriedModel(12.0, 3.0), []
    run(name, model, torch.cat([noise(VIDEO, 1), noise(AUDIO, 2)], dim=-1), sigmas.turbo(4, 12.0), on_step=lambda i, *more: steps.append(i))
    assert steps == [0, 1, 2, 3]
    assert len(model.seen) == (7 if name == "res_2s" else 4)


def test_more_streams_than_h3_has():
    with pytest.raises(ValueError, match="3 parts"):
        samplers.streams(sigmas.turbo(4, 12.0), [1, 2, 3], 12.0, 3.0)
    with pytest.raises(ValueError, match="shift_audio is -1"):
        samplers.streams(sigmas.turbo(4, 12.0), [1, 2], 12.0, -1)
