"""What `jaxmm buckets` prints."""

from jaxmm.host.buckets import Buckets
from jaxmm.sizes import Sizes, describe


def test_pictures_above_the_largest_bucket_are_described_as_refused() -> None:
    sizes = Sizes(
        page_size=16,
        num_pages=40,
        num_rows=128,
        max_running=16,
        max_model_len=512,
        max_step_tokens=128,
        max_lane_patches=1280,
        buckets=Buckets(tokens=(16, 128), patches=(256, 1280)),
    )
    lines = describe(sizes, lambda width, height: width * height // 196).splitlines()
    # 448 * 448 / 196 = 1024 patches, a fifth of 1280 is filler; 640 * 480 / 196 = 1567
    assert "448x448        1024    1280    20.0%" in lines
    assert "640x480        1567 refused: above the largest bucket" in lines
