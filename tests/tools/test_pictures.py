"""The scripts that draw the pictures of docs/, at toy size: what they print is what docs/ says."""

import pytest
import readme
from programs import output_of, table_of

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def numbers(tmp_path):
    """Runs a script, which must draw something; what it prints, by line."""

    def run(name, *arguments, picture=None):
        out = tmp_path / "picture.png"
        table = table_of(output_of(name, *arguments, "--out", str(out)))
        assert out.read_bytes().startswith(b"\x89PNG")
        assert (readme.ROOT / "docs" / (picture or name.replace(".py", ".png"))).exists()
        return table

    return run


def test_estimators(numbers):
    table = numbers("estimators.py")
    for kl in ("0.01", "1"):
        (k1, k2, k3) = (table[f"{name} at {kl} nats"] for name in ("k1", "k2", "k3"))
        assert k1[0] == k3[0] == 0
        assert (k1[2], k2[2]) == (1, 0)
    assert k2[0] > 0.4
    assert k3[2] > 0.5
    assert table["k3 at 0.01 nats"][2] == pytest.approx(0.1, abs=0.02)
    assert table["k1 at 0.01 nats"][1] > 5 * table["k3 at 0.01 nats"][1]


def test_samples(numbers):
    table = numbers("samples.py", "--repeats", "100")
    assert table["near, k3"][3] < table["near, k1"][-1]
    assert min(table["far, k2"]) > 0.5
    few_tokens, many_tokens = table["far, k3"][-2:]
    assert (few_tokens / many_tokens) == pytest.approx(2, abs=0.5)  # 4 times the tokens
    assert table["far, k3"][-1] < 0.7 * table["far, k1"][-1]


def test_directions(numbers):
    table = numbers("directions.py", "--steps", "150")
    reverse, forward, jsd = (int(words[-1]) for words in table.values())
    assert reverse > 100  # the right peak is word 108
    assert 80 < forward < 100  # between both
    assert 80 < jsd < 100


def test_floor(numbers):
    """At full size, as the page says these numbers."""
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
    assert f"in fp16 {fp16[2]:.1f} times and {fp16[3]:.2f};" in page


def test_rollout(numbers):
    table = numbers("rollout.py", "--sequences", "4000")
    uncorrected, unbounded, tis, _, bounded, rule, *_, strict = table["drift 1.5e-02"]
    assert tis < 0.3 * uncorrected
    assert unbounded < 0.3 * uncorrected
    assert bounded > tis
    assert max(rule, strict) < 0.3 * uncorrected
    uncorrected, _, tis, _, _, rule, *_, strict = table["drift 1.6e-01"]  # a name has digits
    assert rule < tis < uncorrected < strict


def test_controllers(numbers):
    table = numbers("controllers.py", "--seeds", "6", picture="rules.png")
    (fixed,), (ziegler,), (mine,), (nupi,) = table.values()
    assert fixed > 2 * max(ziegler, mine)
    assert nupi < min(ziegler, mine)
