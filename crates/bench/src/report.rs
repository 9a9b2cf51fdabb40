//! The bars, the table and the JSON.

use std::fmt::Write as _;

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::{
    Part,
    machine::Machine,
    samples::{Column, Row, Samples, percentile},
};

/// A promise of ours about the medians of one run.
#[derive(Debug, Serialize)]
pub(crate) struct Bar {
    pub(crate) name: &'static str,
    /// A ratio of two medians, or their difference, or one of them alone: as the name says.
    pub(crate) value: f64,
    /// The median of the rounds' own ratios: what came side by side in time. To judge the other one by, not a bar.
    pub(crate) paired: Option<f64>,
    pub(crate) at_most: Option<f64>,
    pub(crate) at_least: Option<f64>,
    pub(crate) met: bool,
}

impl Bar {
    fn bound(&self) -> String {
        match (self.at_most, self.at_least) {
            (Some(most), _) => format!("at most {most}"),
            (_, Some(least)) => format!("at least {least}"),
            (None, None) => "no bar".to_owned(),
        }
    }
}

enum Bound {
    AtMost(f64),
    AtLeast(f64),
    /// It is told, and held against nothing.
    None,
}

struct Definition {
    part: Part,
    name: &'static str,
    of: (Row, Column),
    to: Measure,
    bound: Bound,
}

/// What a median is held against.
enum Measure {
    /// It is divided by this one.
    Times(Row, Column),
    /// This one is taken from it.
    Over(Row, Column),
    /// It counts as it is.
    Itself,
}

/// Of runsc's own checkpoint, one sync of its bytes, and hashing and compressing them on all cores.
pub(crate) const CHECKPOINT_AT_MOST: f64 = 1.3;
/// Of runsc's own restore, and decompressing and hashing on all cores.
pub(crate) const UNCACHED_AT_MOST: f64 = 1.3;

/// What a client gets at least of what the FIFO carries.
const OF_THE_FIFO: f64 = 0.6;

/// Of a create for which a sandbox waits, in milliseconds, and of its first output when the request came first.
const READY_MS: f64 = 10.0;
const FIRST_OUTPUT_MS: f64 = 20.0;
/// To the first byte of a program, in milliseconds.
const FIRST_BYTE_MS: f64 = 3.0;
/// Of an idle sandbox over one of runsc alone, in MiB.
const IDLE_MIB: f64 = 2.0;

const BARS: [Definition; 25] = [
    Definition {
        part: Part::Latency,
        name: "cold create : raw `runsc run` until the agent answers",
        of: (Row::Create, Column::Server),
        to: Measure::Times(Row::Create, Column::Raw),
        bound: Bound::AtMost(1.25),
    },
    Definition {
        part: Part::Latency,
        name: "bash echo without spares, request to DONE : a bare spawn as the agent measures it",
        of: (Row::EchoFresh, Column::Server),
        to: Measure::Times(Row::EchoAgent, Column::Server),
        bound: Bound::AtMost(1.3),
    },
    Definition {
        part: Part::Stdout,
        name: "stdout by 64 KiB writes : what the FIFO carries",
        of: (Row::StdoutLarge, Column::Server),
        to: Measure::Times(Row::StdoutLarge, Column::Fifo),
        bound: Bound::AtLeast(OF_THE_FIFO),
    },
    Definition {
        part: Part::Stdout,
        name: "stdout by 4 KiB writes : what the FIFO carries",
        of: (Row::StdoutSmall, Column::Server),
        to: Measure::Times(Row::StdoutSmall, Column::Fifo),
        bound: Bound::AtLeast(OF_THE_FIFO),
    },
    Definition {
        part: Part::Saves,
        name: "checkpoint of 100 MiB until durable : runsc checkpoint + sync + BLAKE3 and zstd -1 of the same bytes",
        of: (Row::Checkpoint, Column::Server),
        to: Measure::Times(Row::Checkpoint, Column::Raw),
        bound: Bound::AtMost(CHECKPOINT_AT_MOST),
    },
    Definition {
        part: Part::Saves,
        name: "... of 64 MiB",
        of: (Row::CheckpointSmall, Column::Server),
        to: Measure::Times(Row::CheckpointSmall, Column::Raw),
        bound: Bound::AtMost(CHECKPOINT_AT_MOST),
    },
    Definition {
        part: Part::Saves,
        name: "MiB written by the next checkpoint : one contiguous MiB that changed",
        of: (Row::SecondWrites, Column::Server),
        to: Measure::Times(Row::SecondWrites, Column::Raw),
        bound: Bound::AtMost(5.0),
    },
    Definition {
        part: Part::Saves,
        name: "attach with restore, data in the cache, a container waiting : raw `runsc restore`",
        of: (Row::RestoreCached, Column::Server),
        to: Measure::Times(Row::RestoreCached, Column::Raw),
        bound: Bound::AtMost(0.7),
    },
    Definition {
        part: Part::Saves,
        name: "... and until its program has read all of its memory, which is there when `runsc restore` returns",
        of: (Row::RestoreWhole, Column::Server),
        to: Measure::Times(Row::RestoreWhole, Column::Raw),
        bound: Bound::None,
    },
    Definition {
        part: Part::Saves,
        name: "restore, data on the volume : raw `runsc restore` + zstd back and BLAKE3",
        of: (Row::RestoreUncached, Column::Server),
        to: Measure::Times(Row::RestoreUncached, Column::Raw),
        bound: Bound::AtMost(UNCACHED_AT_MOST),
    },
    Definition {
        part: Part::Saves,
        name: "handoff : the bars of a checkpoint and of a restore from the volume",
        of: (Row::Handoff, Column::Server),
        to: Measure::Times(Row::Handoff, Column::Raw),
        bound: Bound::AtMost(1.3),
    },
    Definition {
        part: Part::Saves,
        name: "8 forks at once : 8 raw `runsc restore` at once",
        of: (Row::Forks, Column::Server),
        to: Measure::Times(Row::Forks, Column::Raw),
        bound: Bound::AtMost(1.15),
    },
    Definition {
        part: Part::Saves,
        name: "autosave, the longest pause that a program sees : that of `runsc checkpoint -leave-running`",
        of: (Row::AutosavePause, Column::Server),
        to: Measure::Times(Row::AutosavePause, Column::Raw),
        bound: Bound::AtMost(1.3),
    },
    Definition {
        part: Part::Saves,
        name: "MiB written by each autosave : one contiguous MiB that changed",
        of: (Row::AutosaveWrites, Column::Server),
        to: Measure::Times(Row::AutosaveWrites, Column::Raw),
        bound: Bound::AtMost(10.0),
    },
    Definition {
        part: Part::Latency,
        name: "create to RUNNING, configuration sent first, one waiting, in ms",
        of: (Row::CreateReady, Column::Server),
        to: Measure::Itself,
        bound: Bound::AtMost(READY_MS),
    },
    Definition {
        part: Part::Latency,
        name: "create to first bash output, the request being the first message, one waiting, in ms",
        of: (Row::CreateToOutput, Column::Server),
        to: Measure::Itself,
        bound: Bound::AtMost(FIRST_OUTPUT_MS),
    },
    Definition {
        part: Part::Latency,
        name: "bash echo, first byte, in ms",
        of: (Row::EchoFirst, Column::Server),
        to: Measure::Itself,
        bound: Bound::AtMost(FIRST_BYTE_MS),
    },
    Definition {
        part: Part::Latency,
        name: "bash echo to its end, PyPI gvisor : this server",
        of: (Row::EchoDone, Column::Package),
        to: Measure::Times(Row::EchoDone, Column::Server),
        bound: Bound::AtLeast(6.0),
    },
    Definition {
        part: Part::Latency,
        name: "Python print, first byte, in ms",
        of: (Row::PrintFirst, Column::Server),
        to: Measure::Itself,
        bound: Bound::AtMost(FIRST_BYTE_MS),
    },
    Definition {
        part: Part::Latency,
        name: "Python print to its end, PyPI gvisor : this server",
        of: (Row::PrintDone, Column::Package),
        to: Measure::Times(Row::PrintDone, Column::Server),
        bound: Bound::AtLeast(2.5),
    },
    Definition {
        part: Part::Latency,
        name: "Python with four imports to its end, PyPI gvisor : this server",
        of: (Row::ImportsDone, Column::Package),
        to: Measure::Times(Row::ImportsDone, Column::Server),
        bound: Bound::AtLeast(7.0),
    },
    Definition {
        part: Part::Latency,
        name: "executions back to back, spares running dry : without spares",
        of: (Row::BackToBack, Column::Server),
        to: Measure::Times(Row::BackToBackFresh, Column::Server),
        bound: Bound::AtMost(1.0),
    },
    Definition {
        part: Part::Stdout,
        name: "stdout by 64 KiB writes : PyPI gvisor",
        of: (Row::StdoutLarge, Column::Server),
        to: Measure::Times(Row::StdoutLarge, Column::Package),
        // Five times was wanted, and is more than the FIFO carries: docs/design/2026-11-18-what-a-sandbox-can-print.md.
        bound: Bound::None,
    },
    Definition {
        part: Part::Stdout,
        name: "stdout by 4 KiB writes : PyPI gvisor",
        of: (Row::StdoutSmall, Column::Server),
        to: Measure::Times(Row::StdoutSmall, Column::Package),
        // Five times was wanted, and is more than the FIFO carries: docs/design/2026-11-18-what-a-sandbox-can-print.md.
        bound: Bound::None,
    },
    Definition {
        part: Part::Memory,
        name: "memory of an idle sandbox without spares over raw runsc, in MiB",
        of: (Row::Memory, Column::Server),
        to: Measure::Over(Row::Memory, Column::Raw),
        bound: Bound::AtMost(IDLE_MIB),
    },
];

/// The bars of some parts. What is missing is missed.
pub(crate) fn bars(samples: &Samples, parts: &[Part]) -> Vec<Bar> {
    BARS.iter()
        .filter(|bar| parts.contains(&bar.part))
        .map(|Definition { name, of, to, bound, .. }| {
            let median = |row, column| samples.summary(row, column).map(|summary| summary.p50);
            let held = median(of.0, of.1);
            let (value, pair) = match *to {
                Measure::Times(row, column) => (held.zip(median(row, column)).map(|(of, to)| of / to), Some((row, column))),
                Measure::Over(row, column) => (held.zip(median(row, column)).map(|(of, to)| of - to), None),
                Measure::Itself => (held, None),
            };
            let value = value.unwrap_or(f64::NAN);
            let paired = pair.and_then(|(row, column)| {
                let pairs = samples.get(of.0, of.1).iter().zip(samples.get(row, column));
                percentile(&pairs.map(|(of, to)| of / to).collect::<Vec<_>>(), 50.0)
            });
            let (at_most, at_least, met) = match *bound {
                Bound::AtMost(most) => (Some(most), None, value <= most),
                Bound::AtLeast(least) => (None, Some(least), value >= least),
                Bound::None => (None, None, !value.is_nan()),
            };
            Bar { name, value, paired, at_most, at_least, met }
        })
        .collect()
}

pub(crate) fn table(samples: &Samples, bars: &[Bar], machine: &Machine, rounds: usize, imports: &str) -> String {
    let mut text = String::new();
    let mut line = |line: String| {
        // Writing to memory can't fail.
        let _ = writeln!(text, "{}", line.trim_end());
    };
    let heads = Column::ALL.map(|column| format!("{:>19}", column.title())).concat();
    line(format!("{:<42}{heads}", "p50 / p99"));
    for row in Row::ALL.into_iter().filter(|row| Column::ALL.iter().any(|column| !samples.get(*row, *column).is_empty())) {
        let cells = Column::ALL.map(|column| match samples.summary(row, column) {
            Some(summary) if summary.count > 1 => format!("{:>19}", format!("{} / {}", short(summary.p50), short(summary.p99))),
            Some(summary) => format!("{:>19}", short(summary.p50)),
            None => format!("{:>19}", "–"),
        });
        line(format!("{:<42}{}", row.title(), cells.concat()));
    }
    line(String::new());
    for bar in bars {
        let verdict = match (bar.met, bar.at_most.or(bar.at_least)) {
            (false, _) => "MISSED",
            (true, Some(_)) => "met   ",
            (true, None) => "told  ",
        };
        let paired = bar.paired.map_or_else(String::new, |paired| format!(", side by side {paired:.2}"));
        line(format!("{verdict} {:.2} ({}{paired})  {}", bar.value, bar.bound(), bar.name));
    }
    line(String::new());
    line(format!(
        "{rounds} rounds on {} CPUs, Linux {}, runsc {}; four imports: {imports}; of a rate, p99 is the lowest",
        machine.cpus, machine.kernel, machine.runsc
    ));
    if let Some(spin) = machine.spin_ms {
        line(format!(
            "noise: the same work took {:.1} ms at p50 and {:.1} at p99 ({:.2} times); load {} before, {} after",
            spin.p50,
            spin.p99,
            spin.p99 / spin.p50,
            machine.load_before,
            machine.load_after
        ));
    }
    text
}

fn short(value: f64) -> String {
    if value.abs() >= 100.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

pub(crate) fn json(
    samples: &Samples,
    bars: &[Bar],
    machine: &Machine,
    rounds: usize,
    imports: &str,
    missing: &[Option<String>; 2],
) -> Value {
    let mut rows = Map::new();
    for row in Row::ALL {
        let mut cells = Map::new();
        for column in Column::ALL {
            if let Some(summary) = samples.summary(row, column) {
                let cell = json!({"p50": summary.p50, "p99": summary.p99, "values": samples.get(row, column)});
                cells.insert(name(&column), cell);
            }
        }
        rows.insert(name(&row), json!({"title": row.title(), "columns": cells}));
    }
    json!({
        "rounds": rounds,
        "machine": machine,
        "four_imports": imports,
        "rows": rows,
        "bars": bars,
        "package_error": missing[0],
        "docker_error": missing[1],
    })
}

/// As serde names it.
fn name(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_compares_medians_and_what_was_not_measured_is_missed() {
        let mut samples = Samples::default();
        for (server, raw) in [(110.0, 100.0), (500.0, 100.0), (120.0, 100.0)] {
            samples.add(Row::Create, Column::Server, server);
            samples.add(Row::Create, Column::Raw, raw);
        }
        let bars = bars(&samples, &Part::ALL);
        assert!(bars[0].met && (bars[0].value - 1.2).abs() < 1e-9, "{:?}", bars[0]);
        assert!(bars[1..].iter().all(|bar| !bar.met));
    }

    #[test]
    fn rows_and_columns_are_named_in_json() {
        let mut samples = Samples::default();
        samples.add(Row::StdoutLarge, Column::Fifo, 300.0);
        let machine = Machine {
            cpus: 2,
            kernel: String::new(),
            runsc: String::new(),
            load_before: String::new(),
            load_after: String::new(),
            spin_ms: None,
        };
        let json = json(&samples, &[], &machine, 1, "json", &[None, None]);
        assert_eq!(json["rows"]["stdout_large"]["columns"]["fifo"]["p50"], 300.0);
    }
}
