"""Host work for one picture against the Hugging Face processor alone, and by stage.

    python -m tests.bench.bench_host_image [--runs 21]

Ours starts from the encoded file (decode, resize, patches, identity); theirs gets the decoded
picture for nothing ("hf alone"), and once more the file ("hf file"). Runs are interleaved, so that
a busy machine slows all alike.
"""

import argparse
import io
import time
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from jaxmm.host.decode import process_image
from jaxmm.host.decode_pool import DecodePool
from jaxmm.host.identity import item_identity
from jaxmm.host.item import Modality
from jaxmm.host.media import Limits, decode_image
from jaxmm.models.qwen2_vl.processor import ImageProcessor
from tests.bench.machine import describe_run

PROCESSOR = ImageProcessor(min_pixels=3136, max_pixels=12845056)
REFERENCE = Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=12845056)
LIMITS = Limits(max_bytes=32 << 20, max_decode_pixels=100_000_000)
SIZES = [(1080, 1920), (768, 1024), (480, 640)]
"""The largest first: glibc keeps large blocks only when larger ones have been freed, as in a
process that has run for a while; before that theirs takes half as long again for small pictures."""
WARM_UP = 3


def picture(height: int, width: int, form: str) -> bytes:
    """A smooth scene with some grain: compresses like a photograph."""
    chance = np.random.default_rng(height)
    coarse = Image.fromarray(chance.integers(0, 256, (height // 32, width // 32, 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy = np.clip(smooth + chance.integers(-6, 7, smooth.shape), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noisy).save(buffer, form, **({"quality": 90} if form == "JPEG" else {}))
    return buffer.getvalue()


def screen(height: int, width: int) -> bytes:
    """Windows of flat colour full of lines of text: what most PNGs that people send look like."""
    chance = np.random.default_rng(height)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for _ in range(8):
        x, y = (int(chance.integers(0, size * 3 // 4)) for size in (width, height))
        fill = tuple(map(int, chance.integers(160, 256, 3)))
        draw.rectangle((x, y, x + width // 3, y + height // 3), fill, "black")
        for line in range(y + 4, y + height // 3 - 12, 12):
            letters = chance.integers(ord("a"), ord("z") + 1, width // 21).astype(np.uint8)
            draw.text((x + 4, line), letters.tobytes().decode(), "black")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def stages(data: bytes) -> dict[str, Callable[[], object]]:
    """Each stage on the finished output of the one before it."""
    image = decode_image(data, LIMITS)
    height, width = PROCESSOR.resized(image.height, image.width)
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    patches, grid = PROCESSOR.patches(resized)
    name = PROCESSOR.fingerprint
    return {
        "decode": lambda: decode_image(data, LIMITS),
        "resize": lambda: image.resize((width, height), Image.Resampling.BICUBIC),
        "patches": lambda: PROCESSOR.patches(resized),
        "identity": lambda: item_identity(Modality.IMAGE, name, grid, features=patches),
    }


def opened_rgb(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


def measure(works: dict[str, Callable[[], object]], runs: int) -> dict[str, np.ndarray]:
    """Milliseconds of every run, interleaved after the warm-up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for run in range(WARM_UP + runs):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if run >= WARM_UP:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: np.array(values) for name, values in times.items()}


def report(what: str, data: bytes, pool: DecodePool, runs: int) -> None:
    decoded = opened_rgb(data)
    works = {
        "jaxmm": lambda: process_image(data, PROCESSOR, LIMITS),
        "jaxmm pool": lambda: pool.submit(data).result(),
        "hf alone": lambda: REFERENCE(images=[decoded], return_tensors="np"),
        "hf file": lambda: REFERENCE(images=[opened_rgb(data)], return_tensors="np"),
        **stages(data),
    }
    times = measure(works, runs)
    megapixels = decoded.width * decoded.height / 1e6
    print(f"\n{what} {decoded.width} x {decoded.height} ({len(data) / 1e3:.0f} kB)")
    print(f"  {'':12}{'median ms':>11}{'p99 ms':>9}{'ms/MP':>9}")
    for name, values in times.items():
        median = np.median(values)
        p99 = np.percentile(values, 99)
        print(f"  {name:12}{median:11.2f}{p99:9.2f}{median / megapixels:9.2f}")
    ours, alone, file = (np.median(times[k]) for k in ("jaxmm", "hf alone", "hf file"))
    print(f"  ours takes {ours / alone:.2f} of hf alone, {ours / file:.2f} of hf from the file")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=21)
    runs = parser.parse_args().runs
    print(describe_run())
    print(f"workload  one picture at a time; warm-up {WARM_UP}, then {runs} runs, interleaved")
    pool = DecodePool(PROCESSOR, LIMITS, workers=1)
    for size in SIZES:
        report("JPEG", picture(*size, "JPEG"), pool, runs)
        report("noisy PNG", picture(*size, "PNG"), pool, runs)
        report("PNG of a screen", screen(*size), pool, runs)
    pool.close()


if __name__ == "__main__":
    main()
