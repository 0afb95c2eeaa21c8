use super::*;

const NOW: u64 = 1_760_000_000_000_001;

fn rate(text: &str) -> Rate {
    text.parse().unwrap()
}

#[test]
fn rates_have_a_unit_and_up_to_three_decimals() {
    for (text, interval, shown) in [
        ("10/s", 100_000.0, "10/s"),
        ("0.5/s", 2_000_000.0, "0.5/s"),
        (" 30 / m ", 2_000_000.0, "30/m"),
        ("1.250/h", 2_880_000_000.0, "1.25/h"),
        ("1000000/s", 1.0, "1000000/s"),
        ("0.001/h", 3.6e12, "0.001/h"),
    ] {
        assert!((rate(text).interval_us() - interval).abs() < 1e-6 * interval, "{text}");
        assert_eq!(rate(text).to_string(), shown);
    }
    for bad in ["", "10", "10/d", "0/s", "-1/s", "1e3/s", "/s", "inf/s", "NaN/s", "1000001/s"] {
        assert_eq!(bad.parse::<Rate>(), Err(LimitError::Rate), "{bad}");
    }
}

#[test]
fn weights_are_fractions_from_a_hundredth_to_a_thousand() {
    for (text, shown, json) in
        [("3", "3", "3"), ("0.5", "0.5", "0.5"), ("0.01", "0.01", "0.01"), ("1000", "1000", "1000")]
    {
        let weight: Weight = text.parse().unwrap();
        assert_eq!(weight.to_string(), shown);
        assert_eq!(serde_json::to_string(&weight).unwrap(), json);
        assert_eq!(Weight::try_from(text.parse::<f64>().unwrap()), Ok(weight));
    }
    for bad in ["0", "0.009", "1000.1", "-1", "x", "", "1e2"] {
        assert_eq!(bad.parse::<Weight>(), Err(LimitError::Weight), "{bad}");
    }
    let half: Weight = "0.5".parse().unwrap();
    assert_eq!((half.divide(10), Weight::from(2).divide(10)), (20, 5));
}

#[test]
fn settings_of_a_bot_are_read_back_also_as_older_versions_stored_them() {
    let limits = |weight: &str, rate: &str, burst| BotLimits {
        weight: weight.parse().ok(),
        rate: rate.parse().ok(),
        burst,
    };
    for (text, expected) in [
        ("3", limits("3", "", None)),
        ("0.5||", limits("0.5", "", None)),
        ("|10/s|", limits("", "10/s", None)),
        ("2|unlimited|7", limits("2", "unlimited", Some(7))),
        ("", BotLimits::default()),
    ] {
        assert_eq!(BotLimits::parse(text), Some(expected), "{text}");
    }
    for bad in ["x", "1|2|3|4", "1|10/s|x", "0||"] {
        assert_eq!(BotLimits::parse(bad), None, "{bad}");
    }
    let general = limits("2", "10/s", Some(5));
    assert_eq!(limits("", "unlimited", None).or(general).bucket(), None);
    assert_eq!(limits("", "20/s", None).or(general).bucket().unwrap().burst, 5);
    assert_eq!(BotLimits::default().bucket(), None);
}

#[test]
fn a_bucket_holds_the_tokens_of_a_second_unless_it_has_a_burst() {
    assert_eq!(Bucket::new(rate("10/s"), None).burst, 10);
    assert_eq!(Bucket::new(rate("1/m"), None).burst, 1);
    assert_eq!(Bucket::new(rate("1/m"), Some(30)).burst, 30);
    assert_eq!(Bucket::new(rate("0.001/h"), Some(BURST_MAX)).burst, 88, "ten years");
}

#[test]
fn tokens_come_one_by_one_after_the_burst() {
    let bucket = Bucket::new(rate("10/s"), Some(3));
    let (granted, full, next) = bucket.take(5, NOW, 0);
    assert_eq!((granted, full, next), (3, NOW + 300_000, 100_000));
    assert_eq!(bucket.take(1, NOW + 99_999, full), (0, full, 1));
    let (granted, full, next) = bucket.take(5, NOW + 100_000, full);
    assert_eq!((granted, full, next), (1, NOW + 400_000, 100_000));
    let (granted, _, next) = bucket.take(2, NOW + 1_000_000, full);
    assert_eq!((granted, next), (2, 0), "it is full again, and one is left");
}

#[test]
fn a_raised_rate_helps_at_once_and_a_clock_that_was_set_back_blocks_nobody_for_long() {
    let slow = Bucket::new(rate("1/h"), Some(1));
    let (_, full, _) = slow.take(1, NOW, 0);
    let fast = Bucket::new(rate("10/s"), Some(2));
    assert_eq!(fast.take(1, NOW, full), (0, NOW + 200_000, 100_000));
    assert_eq!(fast.take(1, NOW - 5_000_000, NOW), (0, NOW - 4_800_000, 100_000));
}

#[test]
fn no_window_gets_more_than_its_burst_and_its_rate() {
    for (text, burst) in [("3/s", 1), ("3/s", 4), ("7/m", 2), ("999.999/s", 50)] {
        let bucket = Bucket::new(rate(text), Some(burst));
        let (mut now, mut full, mut seed) = (NOW, 0, 7_u64);
        let mut grants: Vec<(u64, u64)> = Vec::new();
        for _ in 0..2_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small")]
            let step = (bucket.interval_us * 2.0) as u64;
            now += (seed >> 33) % step;
            let want = u32::try_from((seed >> 20) % 5).unwrap();
            let (granted, after, _) = bucket.take(want, now, full);
            full = after;
            grants.push((now, granted.into()));
        }
        for from in 0..grants.len() {
            let mut sum = 0;
            for &(at, granted) in &grants[from..] {
                sum += granted;
                #[expect(clippy::cast_precision_loss, reason = "small")]
                let allowed = f64::from(burst) + (at - grants[from].0) as f64 / bucket.interval_us;
                #[expect(clippy::cast_precision_loss, reason = "small")]
                let sum = sum as f64;
                assert!(sum <= allowed + 1e-6, "{text}: {sum} of {allowed}");
            }
        }
    }
}
