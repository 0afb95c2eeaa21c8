//! Tests of the keys and of what is drawn.

use std::time::Duration;

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::{Color, Modifier};

use super::draw::draw;
use super::keys::Effect;
use super::rows::{BotRow, PipelineRow, Snapshot};
use super::state::{BotSort, Command, Dialog, State};
use crate::id::{BotId, PipelineName};
use crate::problems::{Facts, PipelineState, Severity, Viewer, find};
use crate::queue::BotState;

/// 13:00:00.
const NOW: u64 = 13 * 3_600_000;

fn pipeline(name: &str, depth: u64) -> PipelineRow {
    PipelineRow {
        name: PipelineName::parse(name).unwrap(),
        state: PipelineState::Enabled,
        is_paused: false,
        depth,
        in_rate: 12.0,
        out_rate: 3.25,
        oldest_ms: 65_000,
        failing: 0,
        severity: None,
        is_old: false,
    }
}

fn bot(pipeline: &str, id: &str, depth: u64) -> BotRow {
    BotRow {
        pipeline: PipelineName::parse(pipeline).unwrap(),
        bot: BotId::parse(id).unwrap(),
        state: BotState::Ready,
        depth,
        oldest_ms: depth * 1_000,
        failing_since_ms: None,
        reason: String::new(),
    }
}

fn failing(row: BotRow, reason: &str) -> BotRow {
    BotRow { failing_since_ms: Some(1), reason: reason.to_owned(), state: BotState::Parked, ..row }
}

fn snapshot() -> Snapshot {
    let orders =
        PipelineRow { failing: 1, severity: Some(Severity::Critical), ..pipeline("orders", 1_234) };
    let state = PipelineState::Paused;
    let tags = PipelineRow { state, is_paused: true, ..pipeline("tags", 9) };
    Snapshot {
        time_ms: NOW,
        target: "redis.sock".to_owned(),
        pipelines: vec![tags, orders, pipeline("billing", 0)],
        bots: vec![
            bot("orders", "shop-2", 7),
            failing(bot("orders", "shop-1", 1_200), "the receiver answered 500"),
            BotRow { state: BotState::Paused, ..bot("tags", "blog", 9) },
        ],
        ..Snapshot::default()
    }
}

fn with(snapshot: Snapshot) -> State {
    let mut state = State::new(true, Duration::from_secs(2));
    state.take(Ok(snapshot));
    state
}

fn press(state: &mut State, code: KeyCode) -> Option<Effect> {
    state.press(KeyEvent::new(code, KeyModifiers::NONE))
}

fn types(state: &mut State, text: &str) -> Vec<Effect> {
    text.chars().filter_map(|c| press(state, KeyCode::Char(c))).collect()
}

fn drawn_at(state: &State, width: u16, height: u16, now_ms: u64) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, state, now_ms)).unwrap();
    terminal
}

fn lines_of(terminal: &Terminal<TestBackend>) -> Vec<String> {
    let buffer = terminal.backend().buffer();
    let row = |y| (0..buffer.area.width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..buffer.area.height).map(|y| row(y).trim_end().to_owned()).collect()
}

/// The lines of a terminal of 80 × 24.
fn lines(state: &State) -> Vec<String> {
    lines_of(&drawn_at(state, 80, 24, NOW))
}

fn has(lines: &[String], text: &str) -> bool {
    lines.iter().any(|line| line.contains(text))
}

fn place(lines: &[String], text: &str) -> usize {
    let found = lines.iter().position(|line| line.contains(text));
    found.unwrap_or_else(|| panic!("{text:?} is missing in\n{}", lines.join("\n")))
}

#[test]
fn pipelines_bots_and_problems_fit_into_80_columns_and_24_lines() {
    let lines = lines(&with(snapshot()));
    assert_eq!(
        lines[..6].join("\n"),
        "\
fairlane top  redis.sock                                            13:00:00 UTC
▶ Pipelines (3), by name ───────────────────────────────────────────────────────
PIPELINE               STATE            QUEUED    IN/S   OUT/S   OLDEST  FAILING
billing                running               0      12     3.2    1m 5s        -
orders                 running           1,234      12     3.2    1m 5s        1
tags                   paused                9      12     3.2    1m 5s        -"
    );
    assert!(lines[6].starts_with(" Bots by queued ─"), "{lines:#?}");
    let head = &lines[7];
    let row = &lines[8];
    let at = |text: &str| head.find(text).unwrap();
    assert!(row.starts_with("shop-1 "), "{lines:#?}");
    assert!(row[at("PIPELINE")..].starts_with("orders"), "{lines:#?}");
    assert!(row[at("REASON")..].starts_with("the receiver answered"), "{lines:#?}");
    assert_eq!(row.find("1,200").map(|at| at + 5), Some(at("QUEUED") + 6), "{lines:#?}");
    assert!(lines[9].starts_with("blog ") && lines[9].contains("paused"), "{lines:#?}");
    assert!(has(&lines, " Problems (0)") && has(&lines, "nothing is wrong"), "{lines:#?}");
    assert!(lines[23].starts_with("Tab pane") && lines[23].ends_with("q quit"), "{lines:#?}");
}

#[test]
fn every_size_of_a_terminal_is_drawn_with_every_dialog() {
    let mut state = with(snapshot());
    for dialog in [None, Some('?'), Some('p')] {
        if let Some(key) = dialog {
            press(&mut state, KeyCode::Esc);
            press(&mut state, KeyCode::Char(key));
        }
        for (width, height) in [(1, 1), (5, 3), (20, 8), (80, 24), (300, 100)] {
            drawn_at(&state, width, height, NOW);
        }
    }
}

#[test]
fn the_selection_stays_on_its_row_when_the_order_changes() {
    let mut state = with(snapshot());
    press(&mut state, KeyCode::Char('j'));
    assert_eq!(state.command().unwrap().pipeline.as_str(), "orders");
    press(&mut state, KeyCode::Char('s'));
    let lines = lines(&state);
    assert!(place(&lines, "orders") < place(&lines, "billing"), "{lines:#?}");
    assert_eq!(state.command().unwrap().pipeline.as_str(), "orders");
    let mut fewer = snapshot();
    fewer.pipelines.retain(|row| row.name.as_str() != "orders");
    state.take(Ok(fewer));
    assert!(state.command().is_some(), "another row is selected");
    state.take(Ok(Snapshot::default()));
    assert_eq!(state.command(), None);
    assert_eq!(press(&mut state, KeyCode::Enter), None);
}

#[test]
fn pausing_asks_first_and_a_paused_pipeline_is_resumed() {
    let mut state = with(snapshot());
    press(&mut state, KeyCode::Char('p'));
    let asked = lines(&state);
    assert!(has(&asked, "Pause pipeline billing?"), "{asked:#?}");
    assert_eq!(press(&mut state, KeyCode::Char('x')), None);
    assert!(state.dialog.is_some(), "another key answers nothing");
    assert_eq!(press(&mut state, KeyCode::Char('n')), None);
    assert_eq!(state.dialog, None);
    press(&mut state, KeyCode::Char('p'));
    let billing = PipelineName::parse("billing").unwrap();
    let command = Command { pause: true, pipeline: billing, bot: None };
    assert_eq!(press(&mut state, KeyCode::Char('y')), Some(Effect::Do(command)));
    press(&mut state, KeyCode::End);
    press(&mut state, KeyCode::Char('p'));
    assert!(has(&lines(&state), "Resume pipeline tags? y/n"));
}

#[test]
fn a_paused_pipeline_without_an_enabled_section_here_is_shown_as_paused_and_resumed() {
    for state in [PipelineState::Disabled, PipelineState::Unconfigured] {
        let billing = PipelineRow { state, is_paused: true, ..pipeline("billing", 3) };
        let mut state = with(Snapshot { pipelines: vec![billing], ..snapshot() });
        let shown = lines(&state);
        assert!(shown[place(&shown, "billing")].contains("paused"), "{shown:#?}");
        press(&mut state, KeyCode::Char('p'));
        assert!(has(&lines(&state), "Resume pipeline billing? y/n"));
    }
}

#[test]
fn the_selected_bot_is_paused_in_its_pipeline() {
    let mut state = with(snapshot());
    press(&mut state, KeyCode::Tab);
    press(&mut state, KeyCode::Char('p'));
    let Some(Effect::Do(command)) = press(&mut state, KeyCode::Char('y')) else {
        panic!("nothing is done")
    };
    assert_eq!((command.pause, command.pipeline.as_str()), (true, "orders"));
    assert_eq!(command.bot.unwrap().as_str(), "shop-1");
    press(&mut state, KeyCode::Down);
    press(&mut state, KeyCode::Char('p'));
    assert!(has(&lines(&state), "Resume bot blog of pipeline tags?"));
}

#[test]
fn a_filter_shows_names_that_start_with_it_until_esc() {
    let mut state = with(snapshot());
    press(&mut state, KeyCode::Tab);
    let effects = types(&mut state, "/shop");
    assert_eq!(effects, vec![Effect::Read; 4], "the reader reads bots with that start");
    assert_eq!(state.wanted().prefix, "shop");
    press(&mut state, KeyCode::Enter);
    let filtered = lines(&state);
    assert!(has(&filtered, "by queued, shop…") && has(&filtered, "shop-2"), "{filtered:#?}");
    assert!(!has(&filtered, "blog"), "{filtered:#?}");
    assert_eq!(types(&mut state, "q"), [Effect::Quit], "keys are commands again");
    assert_eq!(press(&mut state, KeyCode::Esc), Some(Effect::Read));
    assert!(has(&lines(&state), "blog"));
    press(&mut state, KeyCode::BackTab);
    types(&mut state, "/o");
    assert!(!has(&lines(&state), "billing"));
    press(&mut state, KeyCode::Backspace);
    assert!(has(&lines(&state), "billing"));
}

#[test]
fn bots_are_sorted_limited_to_a_pipeline_or_to_those_that_fail() {
    let mut state = with(snapshot());
    press(&mut state, KeyCode::End);
    assert_eq!(press(&mut state, KeyCode::Enter), Some(Effect::Read));
    let shown = lines(&state);
    assert!(has(&shown, "Bots of tags by queued") && !has(&shown, "shop-1"), "{shown:#?}");
    press(&mut state, KeyCode::Esc);
    press(&mut state, KeyCode::Tab);
    types(&mut state, "ss");
    assert_eq!(state.wanted().sort, BotSort::Failing);
    let shown = lines(&state);
    assert!(has(&shown, "shop-1") && !has(&shown, "shop-2"), "{shown:#?}");
}

#[test]
fn without_an_answer_of_redis_the_last_figures_stay_and_are_marked_as_old() {
    let mut state = with(snapshot());
    state.take(Err("connection refused".to_owned()));
    let terminal = drawn_at(&state, 120, 24, NOW + 12_000);
    let shown = lines_of(&terminal);
    assert!(
        shown[0]
            .contains("Redis does not answer for 12s (figures of 13:00:00): connection refused"),
        "{shown:#?}"
    );
    assert!(has(&shown, "Pipelines (3), by name, old") && has(&shown, "shop-1"), "{shown:#?}");
    let figure = &terminal.backend().buffer()[(0, 4)];
    assert!(figure.modifier.contains(Modifier::DIM), "{figure:?}");
    assert!(press(&mut state, KeyCode::Char('p')).is_none() && state.dialog.is_some());
    state.take(Ok(snapshot()));
    assert!(!has(&lines(&state), "old,"));
    let slow = lines_of(&drawn_at(&state, 80, 24, NOW + 11_000));
    assert!(slow[0].contains("Redis is slow: the figures are 11s old"), "{slow:#?}");
}

#[test]
fn figures_are_old_after_twice_the_interval_of_reading_and_not_before_ten_seconds() {
    for (interval, fresh, old) in [(2, 9, 10), (30, 59, 60)] {
        let mut state = State::new(true, Duration::from_secs(interval));
        state.take(Ok(snapshot()));
        let is_slow = |age: u64| {
            let shown = lines_of(&drawn_at(&state, 80, 24, NOW + age * 1_000));
            shown[0].contains("Redis is slow")
        };
        assert_eq!((is_slow(fresh), is_slow(old)), (false, true), "{interval}");
    }
}

#[test]
fn no_text_from_outside_controls_the_terminal() {
    let mut hostile = snapshot();
    hostile.bots = vec![failing(bot("orders", "shop-1", 1), "\u{1b}[2Jgone\n")];
    let mut state = with(hostile);
    press(&mut state, KeyCode::Tab);
    let shown = lines(&state);
    assert!(has(&shown, "\\u{1b}[2Jgone\\n"), "{shown:#?}");
    press(&mut state, KeyCode::Enter);
    let shown = lines(&state);
    let remedy = "fairlane bots show --pipeline orders shop-1";
    assert!(has(&shown, "\\u{1b}[2Jgone") && has(&shown, remedy), "{shown:#?}");
}

#[test]
fn before_the_first_answer_the_view_says_so() {
    let mut state = State::new(true, Duration::from_secs(2));
    assert!(has(&lines(&state), "reading…"));
    assert!(!has(&lines(&state), "nothing is wrong"));
    state.take(Err("gone".to_owned()));
    assert!(has(&lines(&state), "Redis does not answer: gone"));
}

#[test]
fn a_pipeline_that_cannot_be_read_keeps_its_last_row() {
    let mut state = with(snapshot());
    let mut without = snapshot();
    without.pipelines.retain(|row| row.name.as_str() != "orders");
    without.not_seen = vec![PipelineName::parse("orders").unwrap()];
    state.take(Ok(without.clone()));
    let shown = lines(&state);
    assert!(shown[place(&shown, "orders")].contains("old"), "{shown:#?}");
    without.not_seen.clear();
    state.take(Ok(without));
    assert_eq!(state.pipelines().len(), 2, "a dropped pipeline is gone");
}

#[test]
fn problems_are_those_of_status_and_enter_shows_the_remedy() {
    let facts = Facts::unavailable(
        "redis.sock".to_owned(),
        "connection refused".to_owned(),
        Duration::from_millis(NOW),
    );
    let problems = find(&facts, Viewer::All);
    let expected = problems[0].clone();
    let mut state = with(Snapshot { problems, ..snapshot() });
    press(&mut state, KeyCode::BackTab);
    let shown = lines(&state);
    assert!(has(&shown, "▶ Problems (1)") && has(&shown, "!! "), "{shown:#?}");
    press(&mut state, KeyCode::Enter);
    let Some(Dialog::Details(title, text)) = &state.dialog else { panic!("{:?}", state.dialog) };
    assert_eq!(title, "critical");
    assert!(text.contains(&expected.problem) && text.contains(&expected.remedy), "{text}");
    assert!(has(&lines(&state), "see docs/runbook.md#"));
    press(&mut state, KeyCode::Esc);
    assert_eq!((state.dialog.is_none(), press(&mut state, KeyCode::Char('p'))), (true, None));
}

#[test]
fn the_answer_to_a_command_is_shown_for_a_while() {
    let mut state = with(snapshot());
    state.tell(Ok("pipeline tags goes on".to_owned()), NOW);
    assert!(has(&lines(&state), "pipeline tags goes on"));
    assert!(!has(&lines_of(&drawn_at(&state, 80, 24, NOW + 9_000)), "goes on"));
    state.tell(Err("no answer".to_owned()), NOW);
    assert!(has(&lines(&state), "no answer"));
}

#[test]
fn without_colours_everything_is_still_told() {
    let coloured = with(snapshot());
    let mut plain = with(snapshot());
    plain.colour = false;
    assert_eq!(lines(&coloured), lines(&plain));
    let colours = |state: &State| {
        let terminal = drawn_at(state, 80, 24, NOW);
        let cells = terminal.backend().buffer().content.clone();
        cells.iter().filter(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset).count()
    };
    assert!(colours(&coloured) > 0);
    assert_eq!(colours(&plain), 0);
}

#[test]
fn help_names_every_key_and_ctrl_c_ends() {
    let mut state = with(snapshot());
    press(&mut state, KeyCode::Char('?'));
    let help = lines(&state);
    for key in ["Tab", "pause or resume", "names that start", "q, Ctrl-C"] {
        assert!(has(&help, key), "{key}: {help:#?}");
    }
    let end = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(state.press(end), Some(Effect::Quit), "also while a dialog is open");
    press(&mut state, KeyCode::Char('q'));
    assert_eq!(state.dialog, None, "any key closes the help");
    assert_eq!(press(&mut state, KeyCode::Char('q')), Some(Effect::Quit));
}
