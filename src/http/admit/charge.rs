//! The quotas of tokens and bots, and the requests that are charged to them.

use std::net::IpAddr;
use std::sync::{Arc, RwLock};

use axum::extract::Request;
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderValue};

use super::super::auth::Caller;
use super::super::listen::{Peer, network};
use super::super::problem::{Kind, Problem};
use super::super::routes::Route;
use super::refuse::jitter;
use super::request::covered_bot;
use super::{AdmissionGate, SHED_REASON};
use crate::admission::quota::{Exceeded, Quota, Quotas, Taken};
use crate::admission::{Reason, ShedCounts};
use crate::id::BotId;

/// The quotas and their use.
pub(super) struct UsedQuotas {
    pub(super) settings: RwLock<QuotaSettings>,
    pub(super) bots: Arc<Quotas>,
    pub(super) tokens: Arc<Quotas>,
    /// The quotas of public tokens, and of the client addresses of each.
    pub(super) public: Arc<Quotas>,
}

/// The quotas of bots and tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct QuotaSettings {
    pub(crate) bot: Quota,
    pub(crate) token: Quota,
}

/// The bot that was charged by the path or query.
#[derive(Debug, Clone)]
struct Charged(BotId);

impl AdmissionGate {
    /// Charges the token of a request, and its bot if the path or query names one of the token's.
    pub(in super::super) fn charge(
        &self,
        caller: &Caller,
        request: &mut Request,
    ) -> Result<[Option<Taken>; 2], Problem> {
        let settings = self.quotas();
        if settings == QuotaSettings::default() {
            return Ok([None, None]);
        }
        let now = self.admission.now();
        let token = caller.has_token().then(|| caller.name());
        let of_token = token.map(|token| self.quotas.tokens.take(token, 1, settings.token, now));
        let route = self.routes.find(request.method(), request.extensions());
        let bot = covered_bot(request.uri(), caller);
        let named = bot.as_ref().map(BotId::as_str);
        let whose = Whose { token, bots: named.as_slice(), ..Whose::of(request.extensions()) };
        let of_token = self.judge(of_token, "token", route, &whose)?;
        let of_bot = named.map(|bot| self.quotas.bots.take(bot, 1, settings.bot, now));
        let of_bot = self.judge(of_bot, "bot", route, &whose)?;
        if let Some(bot) = bot {
            request.extensions_mut().insert(Charged(bot));
        }
        Ok([of_token, of_bot])
    }

    /// Charges a bot with `n` events.
    pub(in super::super) fn charge_bot(
        &self,
        bot: &BotId,
        n: u32,
        parts: &Parts,
    ) -> Result<Option<Taken>, Problem> {
        let quota = self.quotas().bot;
        let of_bot = self.quotas.bots.take(bot.as_str(), n, quota, self.admission.now());
        let route = self.routes.find(&parts.method, &parts.extensions);
        let caller = parts.extensions.get::<Caller>().filter(|caller| caller.has_token());
        let (token, bots) = (caller.map(Caller::name), &[bot.as_str()][..]);
        let whose = Whose { token, bots, ..Whose::of(&parts.extensions) };
        self.judge(Some(of_bot), "bot", route, &whose)
    }

    /// Charges the bot of a request that may name it in the body, once the body is read, unless it
    /// was charged before by the path or query.
    pub(in super::super) fn charge_named(
        &self,
        bot: &BotId,
        parts: &Parts,
    ) -> Result<Option<Taken>, Problem> {
        if parts.extensions.get::<Charged>().is_some_and(|Charged(charged)| charged == bot) {
            return Ok(None);
        }
        self.charge_bot(bot, 1, parts)
    }

    /// The refusal of events of which a bot, or the token (`None`), has too many on the bus that are
    /// not copied yet.
    pub(in super::super) fn refuse_backlog(
        &self,
        bot: Option<&BotId>,
        uncopied: u64,
        parts: &Parts,
    ) -> Problem {
        let route = self.routes.find(&parts.method, &parts.extensions);
        let caller = parts.extensions.get::<Caller>().filter(|caller| caller.has_token());
        let named = bot.map(BotId::as_str);
        let whose = Whose {
            token: caller.map(Caller::name),
            bots: named.as_slice(),
            ..Whose::of(&parts.extensions)
        };
        route.shed(route.class, Reason::Bus).increment(1);
        self.admission.refused(route.class, Reason::Bus);
        whose.note(self.admission.counts(), Reason::Bus);
        let sender = named.map_or("this token".to_owned(), |bot| format!("bot {bot:?}"));
        let detail = format!(
            "nothing was stored: {uncopied} events of {sender} are on the bus and not copied yet, the maximum while other senders wait; retry with fewer concurrent requests"
        );
        let reason = HeaderValue::from_static(Reason::Bus.as_str());
        Problem::new(Kind::Quota, detail).header(SHED_REASON, reason).retry_after(jitter(2))
    }

    /// Charges a public token: for the client address, and in total. These bounds apply even while
    /// there is spare capacity.
    pub(in super::super) fn charge_public(
        &self,
        caller: &Caller,
        [of_address, of_all]: [Quota; 2],
        request: &Request,
    ) -> Result<(), Problem> {
        let now = self.admission.now();
        let route = self.routes.find(request.method(), request.extensions());
        let (token, bot) = (caller.name(), covered_bot(request.uri(), caller));
        let named = bot.as_ref().map(BotId::as_str);
        let whose =
            Whose { token: Some(token), bots: named.as_slice(), ..Whose::of(request.extensions()) };
        let address = whose.address.map(|address| format!("{token}\n{address}"));
        let charged = match address {
            Some(address) => self.quotas.public.take(&address, 1, of_address, now).map(drop),
            None => Ok(()),
        };
        let charge_all = || self.quotas.public.take(token, 1, of_all, now).map(drop);
        let charged = charged.and_then(|()| charge_all());
        charged.map_err(|exceeded| self.over_quota("token", route, &whose, exceeded))
    }

    /// A request over its quota succeeds only while there is spare capacity.
    fn judge(
        &self,
        taken: Option<Result<Option<Taken>, Exceeded>>,
        what: &str,
        route: &Route,
        whose: &Whose<'_>,
    ) -> Result<Option<Taken>, Problem> {
        match taken.transpose() {
            Ok(taken) => Ok(taken.flatten()),
            Err(_) if !self.admission.is_tight() => Ok(None),
            Err(exceeded) => Err(self.over_quota(what, route, whose, exceeded)),
        }
    }

    /// Counts a refusal, and returns it with the time until a retry.
    fn over_quota(
        &self,
        what: &str,
        route: &Route,
        whose: &Whose<'_>,
        Exceeded { retry_after }: Exceeded,
    ) -> Problem {
        route.shed(route.class, Reason::Quota).increment(1);
        self.admission.refused(route.class, Reason::Quota);
        whose.note(self.admission.counts(), Reason::Quota);
        let detail = format!("the quota of this {what} is used up; nothing was done");
        let seconds = u32::try_from(retry_after.as_secs()).unwrap_or(u32::MAX);
        let reason = HeaderValue::from_static(Reason::Quota.as_str());
        let problem = Problem::new(Kind::Quota, detail).header(SHED_REASON, reason);
        problem.retry_after(seconds.saturating_add(jitter(1)))
    }
}

/// The token, address and bots of a request.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Whose<'a> {
    pub(super) token: Option<&'a str>,
    pub(super) address: Option<IpAddr>,
    pub(super) bots: &'a [&'a str],
}

impl Whose<'_> {
    /// Only the client address of a request.
    pub(super) fn of(extensions: &Extensions) -> Self {
        let address = extensions.get().map(|Peer(address)| network(*address));
        Self { address, ..Self::default() }
    }

    /// Counts a refusal for its token, its address and each of its bots.
    pub(super) fn note(&self, counts: &ShedCounts, reason: Reason) {
        for bot in self.bots {
            counts.bots.note(*bot, reason);
        }
        if let Some(token) = self.token {
            counts.tokens.note(token, reason);
        }
        if let Some(address) = &self.address {
            counts.addresses.note(address, reason);
        }
    }
}
