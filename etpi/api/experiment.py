"""One experiment's evaluation and training data as frames: `Experiment` and its `Dataset`."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import orjson
import polars as pl

from etpi.api.scan import UnknownName
from etpi_resources.lake.lake import LakeError
from etpi_resources.links import experiment_page, view_url

if TYPE_CHECKING:
    from etpi.api.open_lake import OpenLake


@dataclass(frozen=True, repr=False)
class Experiment:
    """An experiment that a lake has data of; methods return empty frames for stages that have not run."""

    lake: OpenLake
    name: str

    def __repr__(self) -> str:
        return f"Experiment({self.name!r}, {self.lake!r})"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the changes of the main metric, and a link to the page."""
        changed = self.lake.scan("changes", experiment=self.name).collect()
        rows = changed.filter(metric="solved") if "metric" in changed.columns else changed
        name, link = escape(self.name), escape(view_url(experiment_page(self.name)))
        return f'<p><a href="{link}">{name}</a></p>{rows._repr_html_() if len(rows) else "<p>not evaluated</p>"}'

    @property
    def spec(self) -> dict[str, Any]:
        """Return the spec as it was when the experiment last ran; raises LakeError if it never did."""
        rows = self.lake.scan("specs", experiment=self.name, columns=["spec"]).collect()
        if rows.is_empty():
            raise LakeError(f"the lake has no spec of {self.name!r}; run `etpi run {self.name}`")
        return orjson.loads(rows.item())

    def metrics(self) -> pl.DataFrame:
        """Return every measured rate and mean with n and its 95 % interval: the columns of the table `metrics`."""
        return self.lake.scan("metrics", experiment=self.name).collect()

    def failures(self) -> pl.DataFrame:
        """Return the rollouts of the evaluation that did not solve their task, with the reason (sql/reports/failures).

        One row per rollout: checkpoint_role, decoding, task_id, verdict, exit_status, reason, details (JSON), ...
        `infrastructure` is true for rollouts that failed outside the model, which rates exclude.
        """
        return self.lake.report("failures", experiment=self.name)

    def regressions(self) -> pl.DataFrame:
        """Return the tasks whose solved share changed between two checkpoints, losses first (sql/reports/regressions).

        One row per task, decoding and pair of checkpoints (`before`, `after`); `change` is lost or gained.
        """
        return self.lake.report("regressions", experiment=self.name)

    def transcript(self, rollout_id: str) -> pl.DataFrame:
        """Return one rollout as a conversation of all its agents on one clock (sql/reports/transcript).

        The rollout may be of this experiment's evaluation or reinforcement, or of a rollout set that it reads.

        Raises:
            UnknownName: there is no such rollout.
        """
        places = self.lake.sql(
            "SELECT origin, made_for FROM rollouts WHERE rollout_id = $rollout "
            "ORDER BY made_for = $experiment DESC, origin, made_for LIMIT 1",
            rollout=rollout_id, experiment=self.name,
        )  # fmt: skip
        if places.is_empty():
            known = self.lake.scan("rollouts", experiment=self.name, columns=["rollout_id"]).collect()
            raise UnknownName.of(
                f"a rollout of {self.name} or of a rollout set", rollout_id, known.to_series().to_list()
            )
        origin, made_for = places.row(0)
        return self.lake.report("transcript", rollout=rollout_id, origin=origin, made_for=made_for)

    def dataset(self) -> Dataset:
        """Return the experiment's training data."""
        return Dataset(self)


@dataclass(frozen=True, repr=False)
class Dataset:
    """The current training data of an experiment."""

    experiment: Experiment

    def __repr__(self) -> str:
        return f"Dataset({self.experiment!r})"

    def rows(self) -> pl.LazyFrame:
        """Return the training rows: the columns of the table `dataset_rows`; raises as `OpenLake.scan`."""
        return self.experiment.lake.scan("dataset_rows", experiment=self.experiment.name)

    def tokens(self) -> pl.LazyFrame:
        """Return every token of the training rows, each stored token once.

        A turn's prompt is listed as far as it adds to the turn that it extends (`prefix_turn`), so the tokens of an
        agent's turns in order are its conversation, without repetition.

        Columns: rollout_id, agent_id, turn (int32), prefix_turn (int32), pair_id, dataset_row_id, split, side (prompt
        or output), place (int32, the position in the turn's whole prompt + output), token_id (int32), text (null for a
        tokenizer that the catalog does not know), label (bool, whether the token is in the loss), weight (float64,
        weight x copies of the row for labels, else 0). Rows are in the order of the data set, tokens by place.

        Raises:
            LakeError: there is no catalog (the text of ids is in its view `vocabulary`); and as `OpenLake.scan`.
        """
        lake, name = self.experiment.lake, self.experiment.name
        pairs = lake.scan(
            "pairs", experiment=name, columns=["pair_id", "prefix_turn", *_SIDES.values(), "input_tokens"]
        )
        rows = self.rows().select(
            "rollout_id", "agent_id", "turn", "pair_id", "dataset_row_id", "split",
            total=pl.col("weight") * pl.col("copies"),
        ).join(pairs, on="pair_id", how="left", maintain_order="left")  # fmt: skip
        kept = ("rollout_id", "agent_id", "turn", "prefix_turn", "pair_id", "dataset_row_id", "split")
        added = pl.col("suffix_ids").list.len().cast(pl.Int32)
        first = {"prompt": pl.col("input_tokens") - added, "output": pl.col("input_tokens")}
        sides = [
            rows.select(
                *kept,
                side=pl.lit(side),
                place=pl.int_ranges(first[side], first[side] + pl.col(ids).list.len(), dtype=pl.Int32),
                token_id=pl.col(ids),
                label=pl.lit(side == "output"),
                weight=pl.col("total") if side == "output" else pl.lit(0.0),
                row=pl.int_range(pl.len()),
            )
            for side, ids in _SIDES.items()
        ]
        long = pl.concat(sides).filter(pl.col("token_id").list.len() > 0).explode("place", "token_id")
        return (
            long.join(self._vocabulary(), on="token_id", how="left")
            .sort("row", "place")
            .select(*kept, "side", "place", "token_id", "text", "label", "weight")
        )

    def _vocabulary(self) -> pl.LazyFrame:
        tokenizer = (self.experiment.spec.get("base") or {}).get("tokenizer")
        query = "SELECT id AS token_id, text FROM vocabulary WHERE tokenizer = $tokenizer"
        return self.experiment.lake.sql(query, tokenizer=tokenizer).lazy()


_SIDES = {"prompt": "suffix_ids", "output": "output_ids"}
