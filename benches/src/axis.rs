//! The numbers at the axes of charts.

/// The next round number.
pub(crate) fn nice(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let power = 10_f64.powf(value.log10().floor());
    let steps = [1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 5.0, 6.0, 8.0, 10.0];
    steps.iter().map(|step| step * power).find(|nice| *nice >= value).unwrap_or(value)
}

/// A number in few characters.
pub(crate) fn label(value: f64) -> String {
    if value >= 10_000.0 {
        format!("{:.0}k", value / 1_000.0)
    } else if value >= 10.0 || value == 0.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.1}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers_above_the_values() {
        for (value, end) in [(0.0, 1.0), (0.9, 1.0), (95.0, 100.0), (1_870.0, 2_000.0)] {
            assert!((nice(value) - end).abs() < 1e-9, "{value}");
        }
    }
}
