//! Small changes of a script, each of one place.

use std::ops::Range;

use super::lua::{Kind, Token, closing, tokens};

/// One change of a script.
#[derive(Debug, Clone)]
pub(super) struct Change {
    /// The file in `lua/`, without its ending.
    pub(super) script: &'static str,
    /// From 1.
    pub(super) line: usize,
    pub(super) what: String,
    /// The first line that differs, before and after.
    pub(super) before: String,
    pub(super) after: String,
    /// The whole script.
    pub(super) code: String,
}

/// Comparisons and other signs, and what replaces them. Between two operands only.
const SIGNS: &[(&str, &str)] = &[
    ("<", "<="),
    ("<=", "<"),
    (">", ">="),
    (">=", ">"),
    ("==", "~="),
    ("~=", "=="),
    ("and", "or"),
    ("or", "and"),
    ("+", "-"),
    ("-", "+"),
];

/// All changes of a script, each once. Asserts are not changed: only wrong callers meet them.
pub(super) fn changes(script: &'static str, code: &str) -> Vec<Change> {
    let tokens = tokens(code);
    let asserts: Vec<Range<usize>> = (0..tokens.len())
        .filter(|&place| tokens[place].text == "assert" && tokens[place].kind == Kind::Name)
        .map(|place| place..closing(&tokens, place + 1) + 1)
        .collect();
    let mut edits: Vec<(usize, Range<usize>, String, String)> = Vec::new();
    for place in 0..tokens.len() {
        if asserts.iter().any(|range| range.contains(&place)) {
            continue;
        }
        for (range, with, what) in at(&tokens, place) {
            edits.push((tokens[place].line, range, with, what));
        }
    }
    edits.extend(early_returns(&tokens));
    let mut made: Vec<Change> = Vec::new();
    for (line, range, with, what) in edits {
        // Lines keep their numbers.
        let lines = code[range.clone()].matches('\n').count();
        let changed =
            [&code[..range.start], &with, &"\n".repeat(lines), &code[range.end..]].concat();
        let mut pairs = code.lines().zip(changed.lines());
        let Some((before, after)) = pairs.find(|(before, after)| before != after) else { continue };
        if made.iter().all(|other| other.code != changed) {
            let (before, after) = (before.trim().to_owned(), after.trim().to_owned());
            made.push(Change { script, line, what, before, after, code: changed });
        }
    }
    made
}

/// The changes at one token: the part that is replaced, with what, and how to name it.
fn at(tokens: &[Token<'_>], place: usize) -> Vec<(Range<usize>, String, String)> {
    let token = &tokens[place];
    let before = place.checked_sub(1).map(|place| &tokens[place]);
    let mut found = Vec::new();
    let mut replace = |range: Range<usize>, with: &str, what: String| {
        found.push((range, with.to_owned(), what));
    };
    if token.kind == Kind::Number && (token.text == "0" || token.text == "1") {
        let other = if token.text == "0" { "1" } else { "0" };
        replace(token.range(), other, format!("{} is {other}", token.text));
    }
    let is_between = before.is_some_and(Token::ends_operand);
    if let Some((sign, other)) = SIGNS.iter().find(|(sign, _)| token.is(sign) && is_between) {
        replace(token.range(), other, format!("`{sign}` is `{other}`"));
    }
    if token.is("not") {
        replace(token.range(), "", "without `not`".to_owned());
    }
    if token.is_one_of(&["if", "elseif", "while"]) {
        let then = tokens[place..].iter().position(|token| token.is_one_of(&["then", "do"]));
        let last = &tokens[place + then.expect("a condition ends") - 1];
        let condition = tokens[place + 1].at..last.range().end;
        replace(condition.clone(), "false", format!("`{} false`", token.text));
        if !token.is("while") {
            replace(condition, "true", format!("`{} true`", token.text));
        }
    }
    if let Some(end) = call_statement(tokens, place) {
        replace(token.at..tokens[end].range().end, "", "without this call".to_owned());
    }
    found
}

/// If a statement begins here that only calls a function: the place of its last bracket.
fn call_statement(tokens: &[Token<'_>], place: usize) -> Option<usize> {
    let begins = match place.checked_sub(1).map(|place| &tokens[place]) {
        None => true,
        Some(before) if before.is_one_of(&["then", "else", "do", "repeat"]) => true,
        Some(before) => before.ends_operand() && before.line < tokens[place].line,
    };
    if !begins || tokens[place].kind != Kind::Name {
        return None;
    }
    let mut at = place + 1;
    loop {
        let token = tokens.get(at)?;
        if token.is(".") {
            at += 2;
        } else if token.is("(") {
            at = closing(tokens, at) + 1;
            let next = tokens.get(at);
            let goes_on = next.is_some_and(|next| next.is_one_of(&[".", "(", "[", "=", ","]));
            if !goes_on {
                return Some(at - 1);
            }
        } else {
            return None;
        }
    }
}

/// The returns of an `if` that something precedes: without the return, the script goes on.
fn early_returns(tokens: &[Token<'_>]) -> Vec<(usize, Range<usize>, String, String)> {
    let (mut blocks, mut found) = (Vec::new(), Vec::new());
    for (place, token) in tokens.iter().enumerate() {
        if token.is_one_of(&["function", "if", "do", "repeat"]) {
            blocks.push(token.text);
        } else if token.is_one_of(&["end", "until"]) {
            blocks.pop();
        } else if token.is("return") && blocks.last() == Some(&"if") {
            let mut depth = 0;
            let ends = |token: &Token<'_>| {
                depth += i32::from(token.is("function"));
                let is_end = token.is_one_of(&["end", "else", "elseif"]) && depth == 0;
                depth -= i32::from(token.is("end"));
                is_end
            };
            let end = place + tokens[place..].iter().position(ends).expect("a block ends");
            let range = token.at..tokens[end - 1].range().end;
            let is_alone = tokens[place - 1].is("then") && tokens[end].is("end");
            if !is_alone {
                found.push((token.line, range, String::new(), "without this return".to_owned()));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The changed line of each change, in their order.
    fn changed(code: &str) -> Vec<(usize, String)> {
        changes("any", code).into_iter().map(|change| (change.line, change.after)).collect()
    }

    fn of_line(line: usize, lines: &[&str]) -> Vec<(usize, String)> {
        lines.iter().map(|text| (line, (*text).to_owned())).collect()
    }

    #[test]
    fn each_sign_and_number_is_changed_once_but_not_in_texts_comments_and_asserts() {
        let code =
            "-- 1 < 0\nassert(#ARGV == 1, 'a and b')\nlocal a = b - 1 <= -c and '1 < 0' -- 1\n";
        let expected = [
            "local a = b + 1 <= -c and '1 < 0' -- 1",
            "local a = b - 0 <= -c and '1 < 0' -- 1",
            "local a = b - 1 < -c and '1 < 0' -- 1",
            "local a = b - 1 <= -c or '1 < 0' -- 1",
        ];
        assert_eq!(changed(code), of_line(3, &expected));
    }

    #[test]
    fn a_condition_holds_always_and_never() {
        let expected =
            ["if false then a = 2 end", "if true then a = 2 end", "if  b then a = 2 end"];
        assert_eq!(changed("if not b then a = 2 end"), of_line(1, &expected));
    }

    #[test]
    fn a_call_is_left_out_with_all_its_lines_if_it_is_a_statement() {
        let code = "local a = 'b'\ncall('SET', a,\n  f(a))\nlocal c = call('GET',\n  a)\nx.y(a)\n";
        let found = changes("any", code);
        let codes: Vec<&str> = found.iter().map(|change| change.code.as_str()).collect();
        let expected = [
            "local a = 'b'\n\n\nlocal c = call('GET',\n  a)\nx.y(a)\n",
            "local a = 'b'\ncall('SET', a,\n  f(a))\nlocal c = call('GET',\n  a)\n\n",
        ];
        assert_eq!(codes, expected);
        assert_eq!(found[0].before, "call('SET', a,");
    }

    #[test]
    fn an_early_return_is_left_out_if_its_condition_is_not_enough() {
        let code = "if a then\n  b()\n  return {c}\nend\nreturn d\n";
        let found = changes("any", code).pop().expect("a change");
        assert_eq!((found.line, found.code.as_str()), (3, "if a then\n  b()\n  \nend\nreturn d\n"));
    }
}
