"""diffusers: classifier-free guidance as one plan, the pass with and the pass without a prompt."""

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel

import dynaflow_xla as dfx  # +


def main() -> None:
    """A small U-Net with random weights, three steps of denoising."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=16, norm_num_groups=8,
        attention_head_dim=4,
    ).eval()  # fmt: skip
    scheduler = DDIMScheduler(num_train_timesteps=50)
    scheduler.set_timesteps(3)
    start, prompt = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 16)
    nothing = torch.zeros_like(prompt)

    def denoised(both) -> torch.Tensor:
        x = start
        for t in scheduler.timesteps:
            without, with_prompt = both((x, t, nothing), (x, t, prompt))
            x = scheduler.step(without + 5.0 * (with_prompt - without), t, x).prev_sample
        return x

    def one_after_the_other(*calls):
        return tuple(unet(*call, return_dict=False)[0] for call in calls)

    def guided(x, t, states):  # +
        return unet(x, t, states, return_dict=False)[0]  # +

    both = dfx.together(guided, guided, names=["without", "with"], strategy="branches")  # +
    with torch.no_grad():
        plain, fast = denoised(one_after_the_other), denoised(both)
        lanes = dfx.plan(
            both, (start, scheduler.timesteps[0], nothing), (start, scheduler.timesteps[0], prompt)
        )
    print(f"lanes: {len(lanes.lanes_used)}; greatest difference {(fast - plain).abs().max():.1e}")
    assert torch.allclose(plain, fast, atol=1e-4)


if __name__ == "__main__":
    main()
