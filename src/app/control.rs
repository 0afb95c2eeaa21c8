//! Settings that an operator can change while a process runs.

use std::fmt;
use std::sync::Arc;

use crate::admission::{Admission, system_ticks};
use crate::config::AdmissionConfig;
use crate::http::{AdmissionGate, QuotaSettings, ROUTES, Row};
use crate::product::Route;

/// Changes a running [`App`](super::App). Clones change the same one.
#[derive(Clone)]
pub struct Control(pub(super) Arc<AdmissionGate>);

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Control").field(&self.0.admission).finish()
    }
}

impl Control {
    pub(super) fn new(config: AdmissionConfig, products: &[Route]) -> Self {
        let admission = Admission::new(config.settings, system_ticks());
        let of_products =
            products.iter().map(|route| ("*", route.template, route.class, route.body_max));
        let rows: Vec<Row> = ROUTES.iter().copied().chain(of_products).collect();
        let gate = AdmissionGate::new(admission, quotas(config), &rows);
        gate.set_deadlines(config.deadlines);
        Self(Arc::new(gate))
    }

    /// Changes the settings of admission control from now on.
    pub fn set_admission(&self, config: AdmissionConfig) {
        self.0.admission.apply(config.settings);
        self.0.set_quotas(quotas(config));
        self.0.set_deadlines(config.deadlines);
    }
}

fn quotas(config: AdmissionConfig) -> QuotaSettings {
    QuotaSettings { bot: config.bot, token: config.token }
}
