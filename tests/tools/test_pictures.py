"""The scripts of docs/'s pictures, at toy size. They print the numbers that pages state."""

import pytest
import readme
from programs import output_of, table_of

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def numbers(tmp_path):
    """Run a script, check that it draws a picture, and return its printed numbers by line."""

    def run(name, *arguments, picture=None):
        out = tmp_path / "picture.png"
        table = table_of(output_of(name, *arguments, "--out", str(out)))
        assert out.read_bytes().startswith(b"\x89PNG")
        assert (readme.ROOT / "docs" / (picture or name.replace(".py", ".png"))).exists()
        return table

    return run


SCRIPTS = {
    "estimators.py": ((), None),
    "samples.py": (("--repeats", "20"), None),
    "directions.py": (("--steps", "50"), None),
    "rollout.py": (("--sequences", "400"), None),
    "controllers.py": (("--seeds", "2"), "rules.png"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_picture_is_drawn(numbers, name):
    arguments, picture = SCRIPTS[name]
    assert numbers(name, *arguments, picture=picture)


def test_floor(numbers):
    """The script runs at full size, because the page states these numbers."""
    table = numbers("floor.py")
    (bf16, small, fp16, fp32) = (values[::2] for values in table.values())
    assert set(fp32) == {1.0}
    assert all(of_bf16 > of_fp16 for of_bf16, of_fp16 in zip(bf16, fp16, strict=True))
    assert all(list(line) == sorted(line, reverse=True) for line in (bf16, small, fp16))
    page = (readme.ROOT / "docs" / "logits.md").read_text()
    far, near = (f"{table['bf16, deviation 8'][2 * i + 1]:.1e}" for i in (2, 3))
    assert (far, near) == ("2.7e-05", "2.4e-04")
    assert (
        f"{bf16[2]:.0f} times the true one at\n2.7e-5 nats, {bf16[3]:.1f} times at 2.4e-4" in page
    )
    assert bf16[-1] < 1.05
    assert f"In fp16 it is {fp16[2]:.1f} times and {fp16[3]:.2f} times" in page


def test_objectives(numbers):
    """The script runs at full size. The trainings end far apart, whatever tokens are drawn."""
    sampled, top, both = numbers("objectives.py").values()
    assert sampled[0] == both[0] == 0
    assert top[1] == 0 < both[1] < sampled[1]
    assert both[-2] < top[-2] < sampled[-2]
