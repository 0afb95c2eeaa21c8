//! The tokens of a script, and its blocks.

use std::ops::Range;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Name,
    Number,
    Text,
    /// A keyword, an operator or a bracket.
    Sign,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Token<'a> {
    pub(super) kind: Kind,
    pub(super) text: &'a str,
    pub(super) at: usize,
    /// From 1.
    pub(super) line: usize,
}

impl Token<'_> {
    pub(super) fn is(&self, sign: &str) -> bool {
        self.kind == Kind::Sign && self.text == sign
    }

    pub(super) fn is_one_of(&self, signs: &[&str]) -> bool {
        signs.iter().any(|sign| self.is(sign))
    }

    pub(super) fn range(&self) -> Range<usize> {
        self.at..self.at + self.text.len()
    }

    /// Whether an operand ends here, so that a following sign is an operator between two.
    pub(super) fn ends_operand(&self) -> bool {
        self.kind != Kind::Sign
            || self.is_one_of(&[")", "]", "}", "nil", "true", "false", "end", "..."])
    }
}

const KEYWORDS: &[&str] = &[
    "and", "break", "do", "else", "elseif", "end", "false", "for", "function", "if", "in", "local",
    "nil", "not", "or", "repeat", "return", "then", "true", "until", "while",
];

/// All tokens but comments. Scripts have no texts in long brackets.
pub(super) fn tokens(code: &str) -> Vec<Token<'_>> {
    let (mut tokens, mut at, mut line) = (Vec::new(), 0, 1);
    while let Some(first) = code[at..].chars().next() {
        let rest = &code[at..];
        let length = |is_part: fn(char) -> bool| rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        let (kind, length) = if first == '\n' {
            line += 1;
            at += 1;
            continue;
        } else if first.is_whitespace() {
            at += first.len_utf8();
            continue;
        } else if rest.starts_with("--") || rest.starts_with("#!") {
            at += length(|c| c != '\n');
            continue;
        } else if first.is_ascii_digit() {
            (Kind::Number, length(|c| c.is_ascii_alphanumeric()))
        } else if first.is_ascii_alphabetic() || first == '_' {
            let length = length(|c| c.is_ascii_alphanumeric() || c == '_');
            let is_keyword = KEYWORDS.contains(&&rest[..length]);
            (if is_keyword { Kind::Sign } else { Kind::Name }, length)
        } else if first == '\'' || first == '"' {
            (Kind::Text, text_length(rest, first))
        } else {
            let signs = ["...", "..", "==", "~=", "<=", ">="];
            let sign = signs.into_iter().find(|sign| rest.starts_with(sign));
            (Kind::Sign, sign.map_or(first.len_utf8(), str::len))
        };
        tokens.push(Token { kind, text: &rest[..length], at, line });
        at += length;
    }
    tokens
}

fn text_length(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        if c == quote && !escaped {
            return at + 1;
        }
        escaped = c == '\\' && !escaped;
    }
    rest.len()
}

/// The place of the bracket that closes the one at `open`.
pub(super) fn closing(tokens: &[Token<'_>], open: usize) -> usize {
    let mut depth = 0;
    for (place, token) in tokens.iter().enumerate().skip(open) {
        if token.is_one_of(&["(", "[", "{"]) {
            depth += 1;
        } else if token.is_one_of(&[")", "]", "}"]) {
            depth -= 1;
            if depth == 0 {
                return place;
            }
        }
    }
    panic!("no end of the bracket in line {}", tokens[open].line);
}
