//! Draws the view: a function of the state and the time.

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Flex, Layout, Margin, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Cell, Clear, Paragraph, Row, Table, TableState};

use super::keys::{KEYS, state_text};
use super::rows::{BotRow, PipelineRow};
use super::state::{BotSort, Command, Dialog, Pane, PipelineSort, State};
use crate::cli::output::{age, duration, number, plain, rate};
use crate::problems::{PipelineState, Severity};
use crate::queue::BotState;

/// Lines of a pane besides its rows: its title and the names of the columns.
const HEAD: u16 = 2;
/// The pipelines and the problems take at most this part of the height each.
const PART: u16 = 3;
const DIALOG_WIDTH: u16 = 76;

/// Styles, with or without colours.
#[derive(Clone, Copy)]
struct Theme {
    colour: bool,
}

impl Theme {
    fn of(self, colour: Color) -> Style {
        if self.colour { Style::new().fg(colour) } else { Style::new() }
    }

    fn bad(self) -> Style {
        self.of(Color::Red).add_modifier(Modifier::BOLD)
    }

    fn warning(self) -> Style {
        self.of(Color::Yellow)
    }

    fn good(self) -> Style {
        self.of(Color::Green)
    }

    fn severity(self, severity: Severity) -> Style {
        match severity {
            Severity::Critical => self.bad(),
            Severity::Warning => self.warning(),
            Severity::Notice => Style::new(),
        }
    }
}

/// Draws the whole screen.
pub(super) fn draw(frame: &mut Frame<'_>, state: &State, now_ms: u64) {
    let theme = Theme { colour: state.colour };
    let problems = u16::try_from(state.problems().len().max(1)).unwrap_or(u16::MAX);
    let pipelines = u16::try_from(state.pipelines().len().max(1)).unwrap_or(u16::MAX);
    let height = frame.area().height;
    let [header, top, middle, bottom, footer] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(pipelines.saturating_add(HEAD).min(height / PART)),
        Constraint::Min(HEAD),
        Constraint::Length(problems.saturating_add(1).min(height / PART)),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    draw_header(frame, header, state, theme, now_ms);
    draw_pipelines(frame, top, state, theme, now_ms);
    draw_bots(frame, middle, state, theme, now_ms);
    draw_problems(frame, bottom, state, theme, now_ms);
    draw_footer(frame, footer, state, theme, now_ms);
    if let Some(dialog) = &state.dialog {
        draw_dialog(frame, dialog);
    }
}

fn draw_header(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme, now_ms: u64) {
    let strong = Style::new().add_modifier(Modifier::BOLD);
    let mut line = vec![Span::styled("fairlane top  ", strong)];
    match (&state.shown, &state.silent, state.old_ms(now_ms)) {
        (Some(shown), Some(error), age) => {
            let age = duration(age.unwrap_or_default());
            let clock = clock(shown.time_ms);
            let text =
                format!("Redis does not answer for {age} (figures of {clock}): {}", plain(error));
            line.push(Span::styled(text, theme.bad()));
        }
        (None, Some(error), _) => {
            let text = format!("Redis does not answer: {}", plain(error));
            line.push(Span::styled(text, theme.bad()));
        }
        (Some(shown), None, Some(age)) => {
            let text = format!("Redis is slow: the figures are {} old", duration(age));
            line.push(Span::styled(text, theme.warning()));
            line.push(Span::raw(format!("  {}", plain(&shown.target))));
        }
        (Some(shown), None, None) => line.push(Span::raw(plain(&shown.target))),
        (None, None, _) => line.push(Span::raw("reading…")),
    }
    let time = format!(" {} UTC", clock(now_ms));
    let width = u16::try_from(time.len()).unwrap_or_default();
    let [left, right] =
        Layout::horizontal([Constraint::Min(0), Constraint::Length(width)]).areas(area);
    frame.render_widget(Line::from(line), left);
    frame.render_widget(Line::from(time).alignment(Alignment::Right), right);
}

/// The frame of a pane. Returns the area of its content.
fn draw_pane(
    frame: &mut Frame<'_>,
    area: Rect,
    state: &State,
    pane: Pane,
    mut title: String,
    now_ms: u64,
) -> Rect {
    if state.old_ms(now_ms).is_some() {
        title.push_str(", old");
    }
    let is_chosen = state.pane == pane;
    let style = if is_chosen { Style::new().add_modifier(Modifier::BOLD) } else { Style::new() };
    let mark = if is_chosen { "▶ " } else { " " };
    let block = Block::new()
        .borders(Borders::TOP)
        .border_style(Style::new().add_modifier(Modifier::DIM))
        .title(Span::styled(format!("{mark}{title} "), style));
    let inner = block.inner(area);
    frame.render_widget(block, area);
    inner
}

/// The part of a title that tells the filter.
fn filter(prefix: &str) -> String {
    if prefix.is_empty() { String::new() } else { format!(", {}…", plain(prefix)) }
}

fn head<const N: usize>(names: [&'static str; N]) -> Row<'static> {
    let cells = names.map(|name| match name.strip_prefix('>') {
        Some(name) => right(name.to_owned()),
        None => Cell::from(name),
    });
    Row::new(cells).style(Style::new().add_modifier(Modifier::BOLD))
}

fn right(text: String) -> Cell<'static> {
    Cell::from(Line::from(text).alignment(Alignment::Right))
}

/// Draws rows under their heads, or what is said instead of rows.
struct Rows<'a> {
    head: Row<'static>,
    lines: Vec<Row<'a>>,
    widths: &'a [Constraint],
    selected: Option<usize>,
    none: &'static str,
}

fn draw_rows(frame: &mut Frame<'_>, area: Rect, state: &State, now_ms: u64, rows: Rows<'_>) {
    if rows.lines.is_empty() {
        let none = if state.shown.is_some() { rows.none } else { "" };
        frame.render_widget(Line::from(none), area);
        return;
    }
    let style = if state.old_ms(now_ms).is_some() {
        Style::new().add_modifier(Modifier::DIM)
    } else {
        Style::new()
    };
    let table = Table::new(rows.lines, rows.widths)
        .header(rows.head)
        .style(style)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut selection = TableState::new().with_selected(rows.selected);
    frame.render_stateful_widget(table, area, &mut selection);
}

fn draw_pipelines(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme, now_ms: u64) {
    let rows = state.pipelines();
    let by = match state.pipeline_sort {
        PipelineSort::Name => "name",
        PipelineSort::Depth => "queued",
        PipelineSort::Age => "oldest",
        PipelineSort::Failing => "failing",
    };
    let prefix = filter(&state.pipeline_prefix);
    let title = format!("Pipelines ({}), by {by}{prefix}", rows.len());
    let inner = draw_pane(frame, area, state, Pane::Pipelines, title, now_ms);
    let selected = state.selected_pipeline().filter(|_| state.pane == Pane::Pipelines);
    let rows = Rows {
        head: head(["PIPELINE", "STATE", ">QUEUED", ">IN/S", ">OUT/S", ">OLDEST", ">FAILING"]),
        lines: rows.into_iter().map(|row| pipeline_row(row, theme)).collect(),
        widths: &[
            Constraint::Min(16),
            Constraint::Length(12),
            Constraint::Length(10),
            Constraint::Length(7),
            Constraint::Length(7),
            Constraint::Length(8),
            Constraint::Length(8),
        ],
        selected,
        none: "no pipelines",
    };
    draw_rows(frame, inner, state, now_ms, rows);
}

fn pipeline_row(row: &PipelineRow, theme: Theme) -> Row<'_> {
    let (state, style) = match row.state {
        _ if row.is_paused => ("paused", theme.warning()),
        PipelineState::Enabled => ("running", theme.good()),
        state => (state.text(), Style::new()),
    };
    let failing = match row.failing {
        0 => "-".to_owned(),
        bots => number(bots as u64),
    };
    let failing = if row.failing > 0 { right(failing).style(theme.bad()) } else { right(failing) };
    let name = row.severity.map_or(Style::new(), |severity| theme.severity(severity));
    let is_old = if row.is_old { Modifier::DIM } else { Modifier::empty() };
    Row::new([
        Cell::from(row.name.as_str()).style(name),
        Cell::from(if row.is_old { "old" } else { state }).style(style),
        right(number(row.depth)),
        right(rate(row.in_rate)),
        right(rate(row.out_rate)),
        right(age(row.oldest_ms, row.oldest_ms > 0)),
        failing,
    ])
    .style(Style::new().add_modifier(is_old))
}

fn draw_bots(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme, now_ms: u64) {
    let rows = state.bots();
    let by = match state.bot_sort {
        BotSort::Depth => "queued",
        BotSort::Age => "oldest",
        BotSort::Failing => "failing",
    };
    let of = state.only.as_ref().map_or_else(String::new, |name| format!(" of {name}"));
    let title = format!("Bots{of} by {by}{}", filter(&state.bot_prefix));
    let inner = draw_pane(frame, area, state, Pane::Bots, title, now_ms);
    let selected = state.selected_bot().filter(|_| state.pane == Pane::Bots);
    let rows = Rows {
        head: head(["BOT", "PIPELINE", "STATE", ">QUEUED", ">OLDEST", "REASON"]),
        lines: rows.into_iter().map(|row| bot_row(row, theme)).collect(),
        widths: &[
            Constraint::Fill(2),
            Constraint::Max(16),
            Constraint::Length(7),
            Constraint::Length(9),
            Constraint::Length(7),
            Constraint::Fill(3),
        ],
        selected,
        none: if state.bot_sort == BotSort::Failing {
            "no bot fails"
        } else {
            "no bot has queued events"
        },
    };
    draw_rows(frame, inner, state, now_ms, rows);
}

fn bot_row(row: &BotRow, theme: Theme) -> Row<'_> {
    let fails = row.failing_since_ms.is_some();
    let style = match row.state {
        BotState::Paused => theme.warning(),
        _ if fails => theme.bad(),
        _ => Style::new(),
    };
    Row::new([
        Cell::from(plain(row.bot.as_str())),
        Cell::from(row.pipeline.as_str()),
        Cell::from(state_text(row.state)).style(style),
        right(number(row.depth)),
        right(age(row.oldest_ms, row.depth > 0)),
        Cell::from(plain(&row.reason)).style(if fails { theme.bad() } else { Style::new() }),
    ])
}

fn draw_problems(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme, now_ms: u64) {
    let problems = state.problems();
    let title = format!("Problems ({})", problems.len());
    let inner = draw_pane(frame, area, state, Pane::Problems, title, now_ms);
    if problems.is_empty() {
        let said = if state.shown.is_some() { "nothing is wrong" } else { "" };
        frame.render_widget(Line::styled(said, theme.good()), inner);
        return;
    }
    let rows = problems.iter().map(|found| {
        let mark = match found.severity {
            Severity::Critical => "!!",
            Severity::Warning => "!",
            Severity::Notice => "-",
        };
        let mark = Cell::from(mark).style(theme.severity(found.severity));
        Row::new([mark, Cell::from(plain(&found.problem))])
    });
    let table = Table::new(rows, [Constraint::Length(2), Constraint::Min(0)])
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let selected = state.selected_problem().filter(|_| state.pane == Pane::Problems);
    let mut selection = TableState::new().with_selected(selected);
    frame.render_stateful_widget(table, inner, &mut selection);
}

fn draw_footer(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme, now_ms: u64) {
    let line = if state.typing {
        let prefix = match state.pane {
            Pane::Bots => &state.bot_prefix,
            _ => &state.pipeline_prefix,
        };
        Line::from(format!(
            "names that start with: {}▏  Enter keeps it, Esc ends it",
            plain(prefix)
        ))
    } else {
        match state.message(now_ms) {
            Some(Ok(text)) => Line::styled(text.clone(), theme.good()),
            Some(Err(text)) => Line::styled(plain(text), theme.bad()),
            None => Line::styled(
                "Tab pane  s sort  / filter  p pause/resume  Enter more  ? help  q quit",
                Style::new().add_modifier(Modifier::DIM),
            ),
        }
    };
    frame.render_widget(line, area);
}

fn draw_dialog(frame: &mut Frame<'_>, dialog: &Dialog) {
    let (title, text) = match dialog {
        Dialog::Help => ("Keys".to_owned(), help()),
        Dialog::Question(command) => ("y / n".to_owned(), question(command)),
        Dialog::Details(title, text) => (title.clone(), text.clone()),
    };
    let area = frame.area();
    let width = DIALOG_WIDTH.min(area.width);
    let text = wrapped(&text, usize::from(width.saturating_sub(4)));
    let lines = u16::try_from(text.len()).unwrap_or(u16::MAX);
    let text: Vec<Line<'_>> = text.into_iter().map(Line::from).collect();
    let height = lines.saturating_add(2).min(area.height);
    let [area] = Layout::horizontal([Constraint::Length(width)]).flex(Flex::Center).areas(area);
    let [area] = Layout::vertical([Constraint::Length(height)]).flex(Flex::Center).areas(area);
    frame.render_widget(Clear, area);
    frame.render_widget(Block::bordered().title(format!(" {title} ")), area);
    frame.render_widget(Paragraph::new(text), area.inner(Margin::new(2, 1)));
}

/// Breaks lines at spaces, and words that are longer than a line.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let width = width.max(1);
    let mut lines = Vec::new();
    for text in text.lines() {
        let mut line: Vec<char> = Vec::new();
        for word in text.split_inclusive(' ') {
            let mut word: Vec<char> = word.chars().collect();
            let is_space = usize::from(word.last() == Some(&' '));
            if !line.is_empty() && line.len() + word.len() - is_space > width {
                lines.push(line.drain(..).collect());
            }
            while word.len() - is_space > width {
                lines.push(word.drain(..width).collect());
            }
            line.append(&mut word);
        }
        lines.push(line.into_iter().collect());
    }
    lines
}

fn help() -> String {
    let lines = KEYS.map(|(key, does)| format!("{key:<27}  {does}"));
    lines.join("\n")
}

fn question(command: &Command) -> String {
    let Command { pause, pipeline, bot } = command;
    let what = match bot {
        Some(bot) => format!("bot {} of pipeline {pipeline}", plain(bot.as_str())),
        None => format!("pipeline {pipeline}"),
    };
    if *pause {
        format!("Pause {what}? Running slices end normally, and new events are still queued. y/n")
    } else {
        format!("Resume {what}? y/n")
    }
}

/// The time of the day, in UTC.
fn clock(ms: u64) -> String {
    let seconds = ms / 1_000;
    format!("{:02}:{:02}:{:02}", seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60)
}
