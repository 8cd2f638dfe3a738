"""`SensitivityReport`: budgets that hold, ranks, tables, plots."""

from __future__ import annotations

import dataclasses
import json

import matplotlib
import pytest

from qatpatch import PlanError, Profile, Rule, load_profile
from qatpatch.damage_report import Damage, SensitivityReport

matplotlib.use("Agg")


def damages(*rows, loss=False):
    made = [
        Damage(
            name=name,
            linears=() if name.startswith("a") else (name,),
            attentions=(name,) if name.startswith("a") else (),
            error=error,
            loss_change=-error if loss else None,
            dense_bytes=size,
            work=work,
        )
        for name, error, size, work in rows
    ]
    names = [tuple(n for d in made for n in getattr(d, kind)) for kind in ("linears", "attentions")]
    rules = (Rule(match=names[0], action="linear"), Rule(match=names[1], action="attention"))
    base = Profile(name="base", rules=tuple(rule for rule in rules if rule.match))
    return SensitivityReport(
        model_class="Net", base=base, damages=tuple(made), batches=1, error=1.0, loss=1.0 if loss else None
    )


ROWS = (("l1", 0.9, 100, 10), ("a1", 0.8, 0, 30), ("l2", 0.7, 50, 40), ("l3", 0.2, 30, 15), ("l4", 0.0, 10, 5))


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (dict(keep_dense_bytes=0), []),
        (dict(keep_dense_bytes=29), []),
        (dict(keep_dense_bytes=99), ["l2", "l3"]),
        (dict(keep_dense_bytes=100), ["l1"]),
        (dict(keep_dense_bytes=149), ["l1", "l3"]),
        (dict(keep_dense_bytes=150), ["l1", "l2"]),
        (dict(keep_dense_bytes=10**9), ["l1", "l2", "l3"]),
        (dict(keep_dense_work=0.0), []),
        (dict(keep_dense_work=0.1), ["l1"]),
        (dict(keep_dense_work=0.4), ["l1", "a1"]),
        (dict(keep_dense_work=0.25), ["l1", "l3"]),
        (dict(keep_dense_work=1.0), ["l1", "a1", "l2", "l3"]),
    ],
)
def test_budgets_hold_exactly(budget, kept):
    """Worst first, what does not fit is passed over, what does no damage stays quantized."""
    profile = damages(*ROWS).profile(**budget)
    skipped = [name for rule in profile.rules if rule.action == "skip" for name in rule.match]
    assert sorted(skipped) == sorted(kept)
    patched = {name for rule in profile.rules if rule.action != "skip" for name in rule.match}
    assert patched == {row[0] for row in ROWS} - set(kept)


def test_the_report_shows_itself():
    report = damages(*((f"l{i}", 1 / (i + 1), 1 << 20, 5) for i in range(23)), loss=True)
    report = dataclasses.replace(report, unreached=("lost",), loss_change=0.25)
    text, page = str(report), report._repr_html_()
    assert "and 3 more" in text and "l19" in text and "l20" not in text and "no batch reached lost" in text
    assert "100 % off, the loss +0.25 from 1" in text and "<table>" in page and "l19" in page
    ax = report.plot(top=4)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["l0", "l1", "l2", "l3"]
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([100, 50, 100 / 3, 25]) and ax.yaxis_inverted()
    assert report.plot(ax=ax, by="loss_change") is ax
    matplotlib.pyplot.close("all")


def test_profiles_go_to_files_and_back(tmp_path):
    """As docs/profiles.md says."""
    profile = damages(*ROWS).profile(keep_dense_work=0.4, name="kept")
    (tmp_path / "kept.yaml").write_text(json.dumps(dataclasses.asdict(profile)))
    assert load_profile(tmp_path / "kept.yaml") == profile


def test_wrong_questions_are_errors():
    report = damages(*ROWS)
    for arguments in ({}, dict(keep_dense_bytes=1, keep_dense_work=0.1)):
        with pytest.raises(ValueError, match="one budget"):
            report.profile(**arguments)
    for arguments in (dict(keep_dense_bytes=-1), dict(keep_dense_work=1.1), dict(keep_dense_work=float("nan"))):
        with pytest.raises(ValueError, match="keep_dense"):
            report.profile(**arguments)
    whole = sum(damage.dense_bytes for damage in report.damages)
    with pytest.raises(ValueError, match=f"not a share, got 0.5; of all {whole} bytes that share is {whole // 2}"):
        report.profile(keep_dense_bytes=0.5)
    with pytest.raises(ValueError, match="needs a loss"):
        report.ranked("loss_change")
    with pytest.raises(ValueError, match="did you mean 'error'"):
        report.plot(by="errors")
    with pytest.raises(PlanError, match="nothing is left"):
        damages(*ROWS[:1]).profile(keep_dense_bytes=100)
