//! The medians as a picture and as a page, for those who don't want to run it.

use std::fmt::Write as _;

use crate::samples::{Column, Row, Samples};

const WIDTH: f64 = 920.0;
const LABEL: f64 = 300.0;
const BAR: f64 = 12.0;
const GAP: f64 = 14.0;
const TOP: f64 = 64.0;
/// From a tenth of a millisecond on.
const LEAST: f64 = 0.1;

/// What is drawn: times, shorter is better.
const DRAWN: [Row; 12] = [
    Row::Create,
    Row::CreateReady,
    Row::CreateToOutput,
    Row::EchoFirst,
    Row::EchoDone,
    Row::PrintFirst,
    Row::PrintDone,
    Row::ImportsDone,
    Row::Checkpoint,
    Row::RestoreCached,
    Row::RestoreUncached,
    Row::Forks,
];

fn colour(column: Column) -> &'static str {
    match column {
        Column::Raw => "#9aa0a6",
        Column::Fifo => "#c9b37e",
        Column::Package => "#d98c5f",
        Column::Docker => "#7fa38a",
        Column::Server => "#2f6f9f",
    }
}

/// Medians in milliseconds on a logarithmic scale, one bar for each means.
pub(crate) fn svg(samples: &Samples, about: &str) -> String {
    let rows: Vec<(Row, Vec<(Column, f64)>)> = DRAWN
        .into_iter()
        .map(|row| (row, Column::ALL.into_iter().filter_map(|column| Some((column, samples.summary(row, column)?.p50))).collect()))
        .filter(|(_, cells): &(Row, Vec<(Column, f64)>)| !cells.is_empty())
        .collect();
    let most = rows.iter().flat_map(|(_, cells)| cells.iter().map(|(_, value)| *value)).fold(10.0, f64::max);
    let decades = (most / LEAST).log10().ceil().max(1.0);
    let scale = (WIDTH - LABEL - 70.0) / decades;
    let x = |value: f64| LABEL + (value.max(LEAST) / LEAST).log10() * scale;
    #[expect(clippy::cast_precision_loss, reason = "some rows")]
    let height = TOP + rows.iter().map(|(_, cells)| cells.len() as f64 * BAR + GAP).sum::<f64>() + 30.0;
    let mut text = String::new();
    let mut line = |line: String| {
        // Writing to memory can't fail.
        let _ = writeln!(text, "{line}");
    };
    line(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"11\" role=\"img\">"
    ));
    line(format!("<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>"));
    line(
        "<text x=\"10\" y=\"20\" font-size=\"14\" fill=\"#202124\">Milliseconds, median; shorter is better; logarithmic</text>".to_owned(),
    );
    line(format!("<text x=\"10\" y=\"38\" fill=\"#5f6368\">{}</text>", escaped(about)));
    let mut at = LABEL;
    for column in Column::ALL {
        line(format!("<rect x=\"{at}\" y=\"46\" width=\"10\" height=\"10\" fill=\"{}\"/>", colour(column)));
        line(format!("<text x=\"{}\" y=\"55\" fill=\"#202124\">{}</text>", at + 14.0, column.title()));
        at += 120.0;
    }
    let mut value = LEAST;
    while value <= most * 10.0 && x(value) < WIDTH - 20.0 {
        let at = x(value);
        line(format!("<line x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{}\" stroke=\"#e8eaed\"/>", height - 24.0));
        line(format!("<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"#5f6368\">{value}</text>", height - 10.0));
        value *= 10.0;
    }
    let mut y = TOP + 6.0;
    for (row, cells) in rows {
        line(format!("<text x=\"10\" y=\"{:.1}\" fill=\"#202124\">{}</text>", y + 10.0, escaped(row.title())));
        for (column, value) in cells {
            let width = (x(value) - LABEL).max(1.0);
            line(format!("<rect x=\"{LABEL}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{}\" fill=\"{}\"/>", BAR - 2.0, colour(column)));
            line(format!("<text x=\"{:.1}\" y=\"{:.1}\" fill=\"#202124\">{}</text>", LABEL + width + 4.0, y + 9.0, short(value)));
            y += BAR;
        }
        y += GAP;
    }
    line("</svg>".to_owned());
    text
}

/// The table that a run prints, as a page beside the picture.
pub(crate) fn page(table: &str, growth: Option<&str>) -> String {
    let mut page = format!(
        "# The last run\n\nWritten by `make bench`; what the rows are is said in [README.md](README.md).\n\n![medians](latest.svg)\n\n```text\n{table}```\n"
    );
    if let Some(growth) = growth {
        let _ = write!(page, "\n## How cost grows\n\n```text\n{growth}```\n");
    }
    page
}

fn short(value: f64) -> String {
    if value.abs() >= 100.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_is_drawn_and_nothing_else() {
        let mut samples = Samples::default();
        samples.add(Row::Create, Column::Server, 150.0);
        samples.add(Row::Create, Column::Raw, 120.0);
        samples.add(Row::StdoutLarge, Column::Server, 300.0);
        let svg = svg(&samples, "2 CPUs <here>");
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.contains(Row::Create.title()) && !svg.contains(Row::StdoutLarge.title()) && !svg.contains(Row::Forks.title()));
        assert!(svg.contains("&lt;here&gt;") && svg.contains(">150<"));
    }
}
