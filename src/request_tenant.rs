//! The tenant that a request is for. Code that shares something scarce out by turns over tenants can read
//! it: a tenant may have any number of bots.

tokio::task_local! {
    static TENANT: Option<u64>;
}

/// Runs `work` for this tenant. `None`: each bot is one.
pub(crate) fn of<T>(tenant: Option<u64>, work: impl Future<Output = T>) -> impl Future<Output = T> {
    TENANT.scope(tenant, work)
}

/// The tenant of the request. `None`: each bot is one, as for work that is for no request.
pub(crate) fn current() -> Option<u64> {
    TENANT.try_with(|tenant| *tenant).ok().flatten()
}
