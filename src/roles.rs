//! The roles of a process.

/// Which tasks a process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "any combination of the four is a process")]
pub struct Roles {
    /// Reads the bus.
    pub ingest: bool,
    /// Handles events.
    pub work: bool,
    /// Answers HTTP.
    pub http: bool,
    /// Moves delayed events when they are due.
    pub schedule: bool,
}

impl Roles {
    /// All roles.
    pub const ALL: Self = Self { ingest: true, work: true, http: true, schedule: true };

    /// The names of its roles, as in `--roles`.
    #[must_use]
    pub fn names(self) -> Vec<&'static str> {
        let Self { ingest, work, http, schedule } = self;
        let all = [(ingest, "ingest"), (work, "work"), (http, "http"), (schedule, "schedule")];
        all.into_iter().filter(|(has, _)| *has).map(|(_, name)| name).collect()
    }
}
