"""The feature file: what it says is what the spec holds, and every rule it breaks is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foreload.base.codec import FormError
from foreload.pipelines.errors import FeatureError
from foreload.pipelines.samples.feature_file import load_features
from foreload.pipelines.samples.features import (
    KAGGLE_ROWS,
    Dense,
    Feature,
    FeatureSpec,
    Label,
    Table,
    TextFormat,
    features_of,
    features_stored,
)

FILE = """
label = "click"
order_by = "time"
order_type = "integer"

[text]
delimiter = ";"
missing = ["NULL"]

[table.item]
rows = 1000
dimension = 16

[[feature]]
name = "item"

[[feature]]
name = "history"
table = "item"
pooling = "mean"
separator = " "

[[feature]]
name = "user"
column = "..user"
encoding = "vocabulary"
min_count = 3

[[feature]]
name = "shop"
encoding = "id"
rows = 10

[[dense]]
name = "price"
transform = "standard"

[[dense]]
name = "age"
column = "Age"
"""


def load(tmp_path: Path, text: str) -> FeatureSpec:
    path = tmp_path / "features.toml"
    path.write_text(text)
    return load_features(path)


def test_a_feature_file_becomes_a_spec_with_own_tables_behind_the_named_ones(tmp_path: Path) -> None:
    spec = load(tmp_path, FILE)
    assert spec == FeatureSpec(
        labels=(Label("click", "click"),),
        dense=(Dense("price", "price", "standard"), Dense("age", "Age", "log")),
        features=(
            Feature("item", 0, "item", "hash"),
            Feature("history", 0, "history", "hash", "mean", separator=" "),
            Feature("user", 1, "..user", "vocabulary", min_count=3),
            Feature("shop", 2, "shop", "id"),
        ),
        tables=(Table("item", 1000, 16), Table("user", None), Table("shop", 10)),
        order_by="time",
        order_type="integer",
        text=TextFormat(delimiter=";", missing=("NULL",)),
        rule=2,
    )
    assert spec.columns == ("click", "price", "Age", "item", "history", "..user", "shop", "time")
    assert spec.multi_valued
    assert spec.vocabulary_tables == (1,)
    assert spec.min_count(1) == 3


@pytest.mark.parametrize("spec", [FeatureSpec.criteo(), FeatureSpec.synthetic(rows=100, dimension=8)])
def test_a_spec_survives_json(spec: FeatureSpec, tmp_path: Path) -> None:
    for each in (spec, load(tmp_path, FILE)):
        assert features_of(json.loads(json.dumps(features_stored(each)))) == each
        assert json.loads(json.dumps(features_stored(each))) == features_stored(each)


def test_rows_of_a_vocabulary_are_two_more_than_its_values(tmp_path: Path) -> None:
    spec = load(tmp_path, FILE)
    with pytest.raises(FeatureError, match="table user: its rows are known once its vocabulary is counted"):
        _ = spec.table_rows
    assert spec.with_vocabulary({1: 40}).table_rows == (1000, 42, 10)


def test_the_built_in_specs_have_the_kaggle_tables() -> None:
    for spec, encoding in ((FeatureSpec.criteo(), "hash"), (FeatureSpec.synthetic(), "id")):
        assert spec.table_rows == KAGGLE_ROWS
        assert {f.encoding for f in spec.features} == {encoding}
        assert not spec.multi_valued
        assert len(spec.columns) == 40
    assert FeatureSpec.criteo(rows=7).table_rows == (7,) * 26
    assert sum(KAGGLE_ROWS) == 33_762_577


GOOD = 'label = "y"\n[[feature]]\nname = "a"\nrows = 5\n'

# A pattern of the message: the feature file that gives it.
BAD = {
    "label must be a text": GOOD.replace('label = "y"', ""),
    "label must be a text; .* instead of 3": GOOD.replace('"y"', "3"),
    "feature: at least one column to learn from is needed; add a": 'label = "y"',
    "unknown entry 'embedding_dim'; it is called dimension here; known are": GOOD + "embedding_dim = 3",
    "unknown entry 'colour'": GOOD + 'colour = "red"',
    "the feature file: unknown entry 'bogus'": "bogus = 1\n" + GOOD,
    "feature a: encoding must be one of hash, vocabulary, id, not 'one-hot'": GOOD + 'encoding = "one-hot"',
    "feature a: pooling must be one of single, sum, mean, not 'max'": GOOD + 'pooling = "max"',
    "table a: rows is missing": GOOD.replace("rows = 5", ""),
    "table a: rows must be a whole number of at least 1, not 'many'": GOOD.replace("5", '"many"'),
    "table a: rows must be at least 2": GOOD.replace("5", "1"),
    "table a: rows must be below 2\\^63": GOOD.replace("5", str(1 << 63)),
    "table a: dimension must be a whole number of at least 1, not 0": GOOD + "dimension = 0",
    "table a: initial must be uniform, uniform:A, xavier, normal:S or zeros": GOOD + 'initial = "normal"',
    "table must be one of the": GOOD.replace("rows = 5", 'table = "b"'),
    "table b: no feature uses it": GOOD + "[table.b]\nrows = 3",
    r"set them under \[table.a\]": GOOD + "[table.a]\nrows = 3",
    r"set them under \[table.b\]": GOOD + 'table = "b"\n[table.b]\nrows = 3',
    "feature a: two have this name": GOOD + '[[feature]]\nname = "a"',
    'feature a.b: name must not contain "."': GOOD.replace('"a"', '"a.b"'),
    "min_count needs encoding": GOOD + "min_count = 2",
    "min_count must be a whole number of at least 1, not 0": GOOD.replace("rows = 5", 'encoding = "vocabulary"\nmin_count = 0'),
    "its features must have one encoding, not hash, id": GOOD + '[[feature]]\nname = "b"\ntable = "a"\nencoding = "id"',
    "one min_count, not 1, 2": 'label = "y"\n[table.t]\n'
    + "".join(
        f'[[feature]]\nname = "{n}"\ntable = "t"\nencoding = "vocabulary"\nmin_count = {c}\n' for n, c in (("a", 1), ("b", 2))
    ),
    "separator must be a text": GOOD + 'separator = ""',
    "dense d: transform must be one of log, standard, min_max, none, not 'sqrt'": GOOD
    + '[[dense]]\nname = "d"\ntransform = "sqrt"',
    "dense d: two have this name": GOOD + '[[dense]]\nname = "d"\n[[dense]]\nname = "d"',
    "order_type must be one of": 'order_by = "t"\norder_type = "date"\n' + GOOD,
    "without order_by leave out 'number'": 'order_type = "number"\n' + GOOD,
    "delimiter must be one ASCII character, not ',,'": GOOD + '[text]\ndelimiter = ",,"',
    "delimiter cannot be": GOOD + '[text]\ndelimiter = "\\n"',
    "quoting must be true or false, not 1": GOOD + "[text]\nquoting = 1",
    "newlines_in_values needs quoting": GOOD + "[text]\nquoting = false\nnewlines_in_values = true",
    "newlines_in_values must be true, false, or the number of lines": GOOD + "[text]\nnewlines_in_values = -1",
    "missing must be a list of texts": GOOD + "[text]\nmissing = [1]",
    "not valid TOML": "label = ",
    r"write each as \[\[feature\]\]": 'label = "y"\nfeature = 3',
}


@pytest.mark.parametrize("message", BAD)
def test_a_broken_rule_is_named_in_one_line(tmp_path: Path, message: str) -> None:
    with pytest.raises(FeatureError, match=message) as caught:
        load(tmp_path, BAD[message])
    assert "features.toml: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_feature_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FeatureError, match=r"none.toml: cannot read the feature file \(No such file"):
        load_features(tmp_path / "none.toml")
    with pytest.raises(FormError, match="FeatureSpec: must have 'dense'"):
        features_of({"label": "x"})


def test_the_documented_feature_file_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "features.md").read_text(encoding="utf-8")
    spec = load(tmp_path, page.split("```toml\n")[1].split("```")[0])
    assert [t.name for t in spec.tables] == ["site", "ip", "app", "device"]
    assert spec.text.missing == ("NULL", "\\N")
