//! The requests and their times: ads, prepared requests, and due times.

use std::ops::Range;
use std::time::Duration;

use rand::Rng;

/// The ads, of which some are cached before the run. Ad `n` belongs to bot `n % bots`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ads {
    /// Number of ads.
    pub(super) count: usize,
    /// Ads below this number are cached.
    pub(super) cached: usize,
    /// Number of bots.
    pub(super) bots: usize,
}

/// Where the total of an ad is before the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In the cache, and in MongoDB.
    Cached,
    /// In MongoDB only.
    Stored,
    /// Nowhere.
    Unknown,
}

impl Ads {
    pub(super) fn new(count: usize, bots: usize, cached: f64) -> Self {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of at most 2^32 ads, from 0 to 1"
        )]
        let cached = (count as f64 * cached.clamp(0.0, 1.0)).round() as usize;
        Self { count, cached: cached.min(count), bots: bots.clamp(1, count.max(1)) }
    }

    /// Every second uncached ad is stored. Ads above the count appear for the first time during the
    /// run.
    pub(super) fn place(self, ad: usize) -> Place {
        match ad {
            ad if ad < self.cached => Place::Cached,
            ad if ad < self.count && (ad - self.cached).is_multiple_of(2) => Place::Stored,
            _ => Place::Unknown,
        }
    }

    /// The number of the ad's bot.
    pub(super) fn bot(self, ad: usize) -> usize {
        ad % self.bots
    }

    /// The ads of a bot within a range, in steps of `bots`.
    fn of_bot(self, bot: usize, range: Range<usize>) -> (usize, usize) {
        let first = range.start + (bot + self.bots - range.start % self.bots) % self.bots;
        let count = range.end.saturating_sub(first).div_ceil(self.bots);
        (first, count)
    }

    /// A random ad of the bot, cached or not. If the bot has none of that kind, an ad of the other
    /// kind.
    fn any(self, bot: usize, cached: bool, random: &mut impl Rng) -> usize {
        let kinds = [0..self.cached, self.cached..self.count];
        let [yes, no] = kinds.map(|range| self.of_bot(bot, range));
        let (first, count) = match (cached, yes.1, no.1) {
            (true, 1.., _) | (false, _, 0) => yes,
            _ => no,
        };
        first + random.random_range(0..count.max(1)) * self.bots
    }
}

pub(super) fn bot_name(bot: usize) -> String {
    format!("bot-{bot}")
}

pub(super) fn ad_name(ad: usize) -> String {
    format!("ad-{ad}")
}

/// Serialised requests, one after the other.
#[derive(Debug, Default)]
pub(super) struct Requests {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    /// Per view, the number of its ad.
    ads: Vec<usize>,
}

impl Requests {
    /// Random reads of `each` ads of a bot, a `share` of them cached.
    pub(super) fn reads(
        ads: Ads,
        host: &str,
        count: usize,
        (each, share): (usize, f64),
        random: &mut impl Rng,
    ) -> Self {
        let mut requests = Self::default();
        for _ in 0..count {
            let bot = random.random_range(0..ads.bots);
            let ids: Vec<String> = (0..each)
                .map(|_| ad_name(ads.any(bot, random.random_bool(share), random)))
                .collect();
            let (bot, ids) = (bot_name(bot), ids.join(","));
            requests.push(&format!(
                "GET /v1/bots/{bot}/counters?ids={ids} HTTP/1.1\r\nhost: {host}\r\n\r\n"
            ));
        }
        requests
    }

    /// Random views: a `share` of them are of cached ads, and each of the others is of a new ad.
    pub(super) fn views(
        ads: Ads,
        host: &str,
        count: usize,
        share: f64,
        random: &mut impl Rng,
    ) -> Self {
        let mut requests = Self::default();
        let mut fresh = ads.count..;
        for _ in 0..count {
            let known = ads.cached > 0 && random.random_bool(share);
            let ad = if known { Some(random.random_range(0..ads.cached)) } else { fresh.next() };
            requests.push_view(ads, host, ad.unwrap_or_default());
        }
        requests
    }

    /// One view of each cached ad.
    pub(super) fn first_views(ads: Ads, host: &str) -> Self {
        let mut requests = Self::default();
        (0..ads.cached).for_each(|ad| requests.push_view(ads, host, ad));
        requests
    }

    fn push_view(&mut self, ads: Ads, host: &str, ad: usize) {
        let (bot, name) = (bot_name(ads.bot(ad)), ad_name(ad));
        self.push(&format!(
            "POST /v1/bots/{bot}/counters/{name}/views HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: 7\r\n\r\n{{\"n\":1}}"
        ));
        self.ads.push(ad);
    }

    fn push(&mut self, request: &str) {
        self.bytes.extend_from_slice(request.as_bytes());
        self.ends.push(self.bytes.len());
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of a request. The requests are sent in turn.
    pub(super) fn get(&self, number: usize) -> &[u8] {
        let at = number % self.ends.len();
        let begin = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[begin..self.ends[at]]
    }

    /// The ad of a view.
    pub(super) fn ad(&self, number: usize) -> usize {
        self.ads[number % self.ads.len()]
    }

    /// One more than the highest viewed ad.
    pub(super) fn ads_end(&self) -> usize {
        self.ads.iter().max().map_or(0, |ad| ad + 1)
    }
}

/// A due request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticket {
    /// Time since the start.
    pub(super) due: Duration,
    pub(super) what: What,
}

/// The number of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    Read(usize),
    View(usize),
}

/// The due times: reads and views each at a steady rate.
#[derive(Debug, Clone)]
pub(super) struct Schedule {
    reads: Pace,
    views: Pace,
}

/// Due times at `rate` per second. Without a rate, all are due immediately.
#[derive(Debug, Clone, Copy)]
struct Pace {
    rate: Option<u64>,
    /// The remaining numbers.
    next: u64,
    end: u64,
}

impl Schedule {
    /// This many reads and views per second for `seconds`.
    pub(super) fn steady(reads: u64, views: u64, seconds: u64) -> Self {
        let pace = |rate: u64| Pace { rate: Some(rate), next: 0, end: rate * seconds };
        Self { reads: pace(reads), views: pace(views) }
    }

    /// Views, as fast as they are answered.
    pub(super) fn at_once(views: usize) -> Self {
        let none = Pace { rate: None, next: 0, end: 0 };
        Self { reads: none, views: Pace { end: views as u64, ..none } }
    }
}

impl Pace {
    fn due(self) -> Option<Duration> {
        if self.next >= self.end {
            return None;
        }
        let second = u64::try_from(Duration::from_secs(1).as_nanos()).unwrap_or(u64::MAX);
        let due = self.rate.map_or(0, |rate| {
            // This order keeps the fractions, and does not overflow within centuries.
            self.next / rate * second + self.next % rate * second / rate
        });
        Some(Duration::from_nanos(due))
    }
}

impl Iterator for Schedule {
    type Item = Ticket;

    fn next(&mut self) -> Option<Ticket> {
        let (read, view) = (self.reads.due(), self.views.due());
        let is_read = match (read, view) {
            (Some(read), Some(view)) => read <= view,
            (read, _) => read.is_some(),
        };
        let (pace, due) = if is_read { (&mut self.reads, read?) } else { (&mut self.views, view?) };
        let number = usize::try_from(pace.next).unwrap_or(usize::MAX);
        pace.next += 1;
        let what = if is_read { What::Read(number) } else { What::View(number) };
        Some(Ticket { due, what })
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::SmallRng;

    use super::*;

    #[test]
    fn requests_are_due_at_a_steady_pace_whatever_the_others_do() {
        let tickets: Vec<Ticket> = Schedule::steady(3, 2, 2).collect();
        assert!(tickets.is_sorted_by_key(|ticket| ticket.due));
        let due = |wanted: fn(What) -> Option<usize>| -> Vec<(usize, u128)> {
            let of = |ticket: &Ticket| Some((wanted(ticket.what)?, ticket.due.as_millis()));
            tickets.iter().filter_map(of).collect()
        };
        let reads = due(|what| if let What::Read(number) = what { Some(number) } else { None });
        assert_eq!(reads, [(0, 0), (1, 333), (2, 666), (3, 1_000), (4, 1_333), (5, 1_666)]);
        let views = due(|what| if let What::View(number) = what { Some(number) } else { None });
        assert_eq!(views, [(0, 0), (1, 500), (2, 1_000), (3, 1_500)]);
        assert_eq!(Schedule::steady(0, 10_000, 10).count(), 100_000);
        assert_eq!(Schedule::steady(0, 0, 10).count(), 0);
        assert!(Schedule::at_once(3).all(|ticket| ticket.due.is_zero()));
    }

    #[test]
    fn ads_are_cached_stored_or_unknown_in_the_shares_that_were_asked_for() {
        let ads = Ads::new(1_000, 7, 0.95);
        let count = |place| (0..1_000).filter(|ad| ads.place(*ad) == place).count();
        assert_eq!(count(Place::Cached), 950);
        assert_eq!(count(Place::Stored), 25);
        assert_eq!(count(Place::Unknown), 25);
        assert_eq!(ads.place(1_000), Place::Unknown);

        let mut random = SmallRng::seed_from_u64(1);
        for n in 0..10_000 {
            let (bot, cached) = (n % 7, n % 3 > 0);
            let ad = ads.any(bot, cached, &mut random);
            assert_eq!((ads.bot(ad), ads.place(ad) == Place::Cached), (bot, cached), "{ad}");
            assert!(ad < 1_000);
        }
    }

    #[test]
    fn a_bot_without_ads_of_one_kind_is_asked_for_the_other() {
        let mut random = SmallRng::seed_from_u64(1);
        for (share, cached) in [(1.0, false), (0.0, true)] {
            let ads = Ads::new(10, 10, share);
            for bot in 0..10 {
                assert_eq!(ads.any(bot, cached, &mut random), bot);
            }
        }
    }

    #[test]
    fn requests_are_whole_and_their_shares_are_those_asked_for() {
        let ads = Ads::new(1_000, 10, 0.9);
        let mut random = SmallRng::seed_from_u64(1);
        let reads = Requests::reads(ads, "h:1", 1_000, (10, 0.9), &mut random);
        let mut cached = 0;
        for number in 0..reads.len() {
            let text = std::str::from_utf8(reads.get(number)).unwrap();
            let rest = text.strip_prefix("GET /v1/bots/bot-").unwrap();
            let (bot, rest) = rest.split_once("/counters?ids=").unwrap();
            let (ids, rest) = rest.split_once(' ').unwrap();
            assert_eq!(rest, "HTTP/1.1\r\nhost: h:1\r\n\r\n");
            let ids: Vec<usize> =
                ids.split(',').map(|id| id.strip_prefix("ad-").unwrap().parse().unwrap()).collect();
            assert_eq!(ids.len(), 10);
            assert!(ids.iter().all(|ad| ads.bot(*ad) == bot.parse::<usize>().unwrap()));
            cached += ids.iter().filter(|ad| ads.place(**ad) == Place::Cached).count();
        }
        assert!((8_900..9_100).contains(&cached), "{cached}");
        assert_eq!(reads.get(1_000), reads.get(0));

        let views = Requests::views(ads, "h:1", 1_000, 0.9, &mut random);
        let new = (0..1_000).filter(|number| views.ad(*number) >= 1_000).count();
        assert!((70..130).contains(&new), "{new}");
        assert_eq!(views.ads_end(), 1_000 + new, "each of them once");
        let text = std::str::from_utf8(views.get(7)).unwrap();
        let (ad, (head, body)) = (views.ad(7), text.split_once("\r\n\r\n").unwrap());
        assert!(
            head.starts_with(&format!(
                "POST /v1/bots/bot-{}/counters/ad-{ad}/views HTTP/1.1\r\n",
                ad % 10
            )),
            "{head}"
        );
        assert!(head.ends_with(&format!("\r\ncontent-length: {}", body.len())), "{head}");

        let first = Requests::first_views(ads, "h:1");
        assert_eq!((first.len(), first.ads_end()), (900, 900));
    }
}
