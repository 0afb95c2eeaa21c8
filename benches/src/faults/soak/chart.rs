//! Draws what a soak measured: one panel per figure, all over the same time.

#![expect(clippy::cast_precision_loss, reason = "places of points, and figures far below 2^52")]

use std::fmt::Write as _;

use super::Period;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 110.0;
const LEFT: f64 = 64.0;
const TOP: f64 = 30.0;
const GAP: f64 = 38.0;

/// A panel: its title, and its lines with their names and colours.
struct Panel {
    title: &'static str,
    lines: Vec<(&'static str, &'static str, Vec<f64>)>,
}

/// The chart as SVG.
pub(super) fn svg(periods: &[Period]) -> String {
    let panels = panels(periods);
    let total = TOP + panels.len() as f64 * (HEIGHT + GAP) + 10.0;
    let whole = LEFT + WIDTH + 20.0;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {whole} {total}\" \
         font-family=\"sans-serif\" font-size=\"12\" role=\"img\">\n\
         <title>What a soak measured over time</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    let last = periods.last().map_or(1.0, |period| hours(period.from_s)).max(f64::MIN_POSITIVE);
    for (place, panel) in panels.iter().enumerate() {
        draw(&mut text, panel, TOP + place as f64 * (HEIGHT + GAP), last);
    }
    text.push_str("</svg>\n");
    text
}

fn hours(seconds: u64) -> f64 {
    seconds as f64 / 3_600.0
}

fn panels(periods: &[Period]) -> Vec<Panel> {
    let of = |figure: &dyn Fn(&Period) -> f64| periods.iter().map(figure).collect::<Vec<f64>>();
    vec![
        Panel {
            title: "events of the pipeline plain, per second",
            lines: vec![("events", "#1f6feb", of(&|period| period.events_per_s as f64))],
        },
        Panel {
            title: "from the acknowledgement to the effect, ms",
            lines: vec![
                ("p99", "#d1242f", of(&|period| period.p99_ms)),
                ("p50", "#1a7f37", of(&|period| period.p50_ms)),
            ],
        },
        Panel {
            title: "memory, MB",
            lines: vec![
                ("process 0", "#1f6feb", of(&|period| period.used.process.memory_mb as f64)),
                ("Redis", "#d1242f", of(&|period| period.used.redis_mb as f64)),
            ],
        },
        Panel {
            title: "keys in Redis",
            lines: vec![
                ("all", "#1f6feb", of(&|period| period.used.keys as f64)),
                ("without TTL", "#d1242f", of(&|period| period.used.lasting_keys as f64)),
            ],
        },
        Panel {
            title: "descriptors and threads of process 0",
            lines: vec![
                ("descriptors", "#1f6feb", of(&|period| period.used.process.descriptors as f64)),
                ("threads", "#1a7f37", of(&|period| period.used.process.threads as f64)),
            ],
        },
    ]
}

/// A round number that is not below this one.
fn round_up(most: f64) -> f64 {
    if most <= 0.0 {
        return 1.0;
    }
    let unit = 10_f64.powf(most.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|step| step * unit)
        .find(|top| *top >= most)
        .unwrap_or(most)
}

fn draw(text: &mut String, panel: &Panel, top: f64, last_hour: f64) {
    let most = panel.lines.iter().flat_map(|(.., figures)| figures).copied().fold(0.0, f64::max);
    let scale = round_up(most);
    let bottom = top + HEIGHT;
    let _ = writeln!(
        text,
        "<text x=\"{LEFT}\" y=\"{}\" fill=\"#1f2328\">{}</text>",
        top - 6.0,
        panel.title
    );
    for part in [0.0, 0.5, 1.0] {
        let y = bottom - part * HEIGHT;
        let _ = writeln!(
            text,
            "<path d=\"M{LEFT} {y}h{WIDTH}\" stroke=\"#d8dee4\"/>\n\
             <text x=\"{}\" y=\"{}\" text-anchor=\"end\" fill=\"#59636e\">{}</text>",
            LEFT - 6.0,
            y + 4.0,
            part * scale
        );
    }
    for part in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let _ = writeln!(
            text,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"#59636e\">{:.2} h</text>",
            LEFT + part * WIDTH,
            bottom + 15.0,
            part * last_hour
        );
    }
    for (place, (name, colour, figures)) in panel.lines.iter().enumerate() {
        let step = WIDTH / figures.len().saturating_sub(1).max(1) as f64;
        let points: Vec<String> = figures
            .iter()
            .enumerate()
            .map(|(at, figure)| {
                let (x, y) = (LEFT + at as f64 * step, bottom - figure / scale * HEIGHT);
                format!("{x:.1},{y:.1}")
            })
            .collect();
        let _ = writeln!(
            text,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>\n\
             <text x=\"{}\" y=\"{}\" text-anchor=\"end\" fill=\"{colour}\">{name}</text>",
            points.join(" "),
            LEFT + WIDTH - place as f64 * 90.0,
            top - 6.0
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_ends_at_a_round_number() {
        for (most, top) in [(0.0, 1.0), (0.3, 0.5), (7.0, 10.0), (10.0, 10.0), (1_234.0, 2_000.0)] {
            assert!((round_up(most) - top).abs() < 1e-9, "{most}: {}", round_up(most));
        }
    }

    #[test]
    fn each_period_is_a_point_of_each_line() {
        let periods =
            [Period::default(), Period { from_s: 3_600, p99_ms: 5.0, ..Period::default() }];
        let text = svg(&periods);
        assert_eq!(text.matches("<polyline").count(), 9);
        assert!(text.lines().all(|line| !line.contains("NaN")), "{text}");
    }
}
