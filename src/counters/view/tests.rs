use std::time::Duration;

use jiff::civil::date;
use serde_json::json;

use super::*;
use crate::clock::Clock;

struct Fixed(Duration);

impl Clock for Fixed {
    fn now(&self) -> Duration {
        self.0
    }
}

fn calendar(now: &str, zone: &str) -> Calendar {
    let now = now.parse::<Timestamp>().unwrap().as_duration().unsigned_abs();
    Calendar::new(Arc::new(Fixed(now)), TimeZone::get(zone).unwrap())
}

fn bot() -> BotId {
    BotId::parse("bot").unwrap()
}

fn stamp(event: &Event) -> Option<&str> {
    event.extension(STAMP).and_then(serde_json::Value::as_str)
}

#[test]
fn a_replacement_may_have_days_up_to_the_day_after_today_in_the_time_zone() {
    let days = calendar("2026-11-20T22:59:59Z", "Europe/Berlin").days();
    assert_eq!(days, date(2000, 1, 1)..=date(2026, 11, 21));
    let days = calendar("2026-11-20T23:00:00Z", "Europe/Berlin").days();
    assert_eq!(*days.end(), date(2026, 11, 22));
}

#[test]
fn a_redriven_view_keeps_the_day_of_its_arrival() {
    let ad = AdId::parse("x").unwrap();
    let (night, later) =
        (calendar("2026-11-20T23:59:59Z", "UTC"), calendar("2026-11-25T12:00:00Z", "UTC"));
    let (counted, _) = arrived(&view(&bot(), &ad, 3), &night);
    let (again, counts) = returned(&counted, &later);
    assert_eq!((stamp(&again), counts), (Some("2026-11-20"), Some((ad.clone(), 3))));
    // It was not counted when it arrived, so it counts on the day of the redrive.
    let (again, counts) = returned(&on_day(view(&bot(), &ad, 3), None), &later);
    assert_eq!((stamp(&again), counts), (Some("2026-11-25"), Some((ad.clone(), 3))));
    // It would replace views that were counted later.
    let replaced = replacement(&bot(), &ad, &Replacement { total: 7, ..Replacement::default() });
    let (again, counts) = returned(&replaced, &later);
    assert_eq!((stamp(&again), counts), (Some(VOID), None));
    assert!(matches!(read(&again), Err(ViewError::Stamp)));
    let (again, counts) = returned(&again, &later);
    assert_eq!((stamp(&again), counts), (Some(VOID), None), "nor is it a view the second time");
}

#[test]
fn a_stamp_of_a_producer_has_no_effect() {
    let today = calendar("2026-11-20T12:00:00Z", "UTC");
    let forged = |data: &serde_json::Value| {
        let event = Event::builder(VIEWED, &bot()).data(data).unwrap().build().unwrap();
        event.with_extension(STAMP, Some("2001-01-01".into()))
    };
    let (event, _) = arrived(&forged(&json!({ "ad": "x" })), &today);
    assert_eq!(stamp(&event), Some("2026-11-20"));
    let (event, counts) = arrived(&forged(&json!({ "ad": "" })), &today);
    assert_eq!((stamp(&event), counts), (None, None), "so a redrive finds no stamp either");
}
