//! The code of a script: its body, behind those parts of the shared code that it needs.
//!
//! Redis runs the whole text at each call, so each function that the text defines costs every call
//! some 100 ns. A part begins at the start of a line and declares locals, or is a statement, which
//! stays. Comments are left out.

use std::collections::HashSet;

/// The text for Redis: the first line of `file`, what its other lines need of `shared`, these lines.
pub(super) fn assemble(file: &str, shared: &[&str]) -> String {
    let (first, body) = file.split_once('\n').unwrap_or((file, ""));
    let (shared, body) = (code(&shared.join("\n")), code(body));
    let mut needed: HashSet<&str> = words(&body).collect();
    let mut kept = Vec::new();
    // A part uses only what is declared before it.
    for part in parts(&shared).into_iter().rev() {
        let mut declared = declared(part).peekable();
        if declared.peek().is_none() || declared.any(|name| needed.contains(name)) {
            needed.extend(words(part));
            kept.push(part);
        }
    }
    kept.reverse();
    format!("{first}\n{}{body}", kept.concat())
}

/// The lines that are neither empty nor only a comment.
fn code(text: &str) -> String {
    let is_code =
        |line: &&str| !matches!(line.trim_start(), "") && !line.trim_start().starts_with("--");
    text.lines().filter(is_code).flat_map(|line| [line, "\n"]).collect()
}

fn parts(code: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut begin, mut at) = (0, 0);
    for line in code.split_inclusive('\n') {
        let continues =
            line.starts_with(|first: char| !first.is_ascii_alphabetic()) || line.starts_with("end");
        if !continues && at > begin {
            parts.push(&code[begin..at]);
            begin = at;
        }
        at += line.len();
    }
    parts.push(&code[begin..]);
    parts
}

/// The locals that a part declares; none: it is a statement.
fn declared(part: &str) -> impl Iterator<Item = &str> {
    let line = part.lines().next().unwrap_or_default();
    let names = line.strip_prefix("local ").unwrap_or_default();
    let names = match names.strip_prefix("function ") {
        Some(function) => function.split('(').next(),
        None => names.split('=').next(),
    };
    words(names.unwrap_or_default())
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    let is_word = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    text.split(move |letter: char| !is_word(letter)).filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARED: &str = "\
-- About a.
local A, B =
  1, 2

local function double(number)
  return 2 * number
end

-- Uses double.
local function quadruple(number)
  return double(double(number))
end
local unused
";

    #[test]
    fn a_script_has_what_it_needs_in_order_and_nothing_else() {
        let script = assemble("#!lua\n-- double and A\nreturn quadruple(3)\n", &[SHARED]);
        assert_eq!(
            script,
            "#!lua\nlocal function double(number)\n  return 2 * number\nend\n\
             local function quadruple(number)\n  return double(double(number))\nend\n\
             return quadruple(3)\n"
        );
        assert_eq!(
            assemble("#!lua\nreturn B\n", &[SHARED]),
            "#!lua\nlocal A, B =\n  1, 2\nreturn B\n"
        );
        assert_eq!(assemble("#!lua\nreturn 1\n", &[SHARED]), "#!lua\nreturn 1\n");
    }

    #[test]
    fn a_statement_stays() {
        let shared = "local a = 1\nassert(a == 1)\nlocal b = 2\n";
        assert_eq!(
            assemble("#!lua\nreturn 1\n", &[shared]),
            "#!lua\nlocal a = 1\nassert(a == 1)\nreturn 1\n"
        );
    }
}
