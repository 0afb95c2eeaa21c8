//! The memory that a compiled filter takes, estimated by its text: so it is known before it is spent.

use super::Filter;

/// The size of a filter without the parts of its expression, in bytes.
const FILTER: usize = 1_024;
/// The size of a part: its node in the tree, its name, and its place among the values that are copied.
const PART: usize = 160;
/// The macros of CEL, and the number of parts that each adds to those in the text.
const MACROS: [&str; 6] = ["all", "exists", "existsOne", "exists_one", "filter", "map"];
const PARTS_OF_A_MACRO: usize = 10;
/// The signs that may stand for a part.
const SIGNS: &[u8] = b"!-+*/%<>=&|?[{";
/// The operators of two signs.
const PAIRS: [[u8; 2]; 6] = [*b"&&", *b"||", *b"==", *b"!=", *b">=", *b"<="];

impl Filter {
    /// The size of the filter with this text in memory, in bytes. Usual ones take about half as much.
    #[must_use]
    pub fn memory_of(text: &str) -> usize {
        // The rule, the cache and the expression have copies of texts and names.
        FILTER + PART * parts(text) + 4 * text.len()
    }
}

/// The number of parts of an expression, or more. Text in quotes counts as if it had no quotes: only the
/// parser knows where it ends.
fn parts(text: &str) -> usize {
    let is_word = |part: char| part == '_' || part.is_ascii_alphanumeric() || !part.is_ascii();
    let words: usize = text.split(|part: char| !is_word(part)).map(parts_of_word).sum();
    let quotes = text.bytes().filter(|byte| matches!(byte, b'"' | b'\'')).count();
    words + signs(text.as_bytes()) + quotes / 2
}

/// The number of signs. An operator of two signs is one.
fn signs(mut text: &[u8]) -> usize {
    let mut count = 0;
    while let [first, rest @ ..] = text {
        count += usize::from(SIGNS.contains(first));
        let is_pair = rest.first().is_some_and(|second| PAIRS.contains(&[*first, *second]));
        text = if is_pair { &rest[1..] } else { rest };
    }
    count
}

fn parts_of_word(word: &str) -> usize {
    // `1in` is a number and an operator.
    let is_two = word.starts_with(|first: char| first.is_ascii_digit()) && word.ends_with("in");
    let more = if MACROS.contains(&word) { PARTS_OF_A_MACRO } else { 0 };
    usize::from(!word.is_empty()) + usize::from(is_two) + more
}

#[cfg(test)]
mod tests {
    use cel::common::ast::{EntryExpr, Expr, IdedExpr, LiteralValue};

    use super::*;
    use crate::expression::Sees;

    /// The size of an expression in memory, and the number of its parts.
    fn held(part: &IdedExpr) -> (usize, usize) {
        let room = |parts: &Vec<IdedExpr>| (parts.capacity() - parts.len()) * size_of::<IdedExpr>();
        let (own, inner): (usize, Vec<&IdedExpr>) = match &part.expr {
            Expr::Literal(LiteralValue::String(text)) => (text.inner().len(), Vec::new()),
            Expr::Literal(LiteralValue::Bytes(bytes)) => (bytes.inner().len(), Vec::new()),
            Expr::Literal(_) | Expr::Unspecified => (0, Vec::new()),
            Expr::Ident(name) => (name.capacity(), Vec::new()),
            Expr::Select(select) => (select.field.capacity(), vec![&*select.operand]),
            Expr::Call(call) => {
                let inner = call.target.as_deref().into_iter().chain(&call.args);
                (call.func_name.capacity() + room(&call.args), inner.collect())
            }
            Expr::List(list) => (room(&list.elements), list.elements.iter().collect()),
            Expr::Map(map) => {
                let mut inner = Vec::new();
                for entry in &map.entries {
                    let EntryExpr::MapEntry(entry) = &entry.expr else { panic!("{entry:?}") };
                    inner.extend([&entry.key, &entry.value]);
                }
                (map.entries.capacity() * 2 * size_of::<u64>(), inner)
            }
            Expr::Struct(made) => panic!("{made:?}"),
            Expr::Comprehension(over) => {
                let names = over.iter_var.capacity() + over.accu_var.capacity();
                let inner = vec![
                    &over.iter_range,
                    &over.accu_init,
                    &over.loop_cond,
                    &over.loop_step,
                    &over.result,
                ];
                (names + 3 * size_of::<String>(), inner)
            }
        };
        let begin = (own + size_of::<IdedExpr>(), 1);
        inner.into_iter().map(held).fold(begin, |sum, more| (sum.0 + more.0, sum.1 + more.1))
    }

    #[test]
    fn a_filter_takes_no_more_memory_than_its_text_tells() {
        let many = |part: &str| {
            let all = vec![part; 3_600 / (part.len() + 1)];
            format!("event.data.n in [{}]", all.join(","))
        };
        let minus = (0..9).map(|n| format!("event.data.field_{n}-{n} in event.data.l||"));
        for text in [
            "event.data.tag == \"vip\" && subscriber.age > 30".to_owned(),
            many("1"),
            many("-1.5"),
            many("''"),
            many("{}"),
            many("1in[]"),
            many("1==1"),
            many("1!=-1"),
            many("1>=1"),
            many("true&&!true"),
            many("{1:!true}"),
            many("event"),
            many("r'\\'").replace("event.data.n in", "'''\"''' in"),
            "[1].all(a,a==1)||[1].exists(a,a==1)||[1].exists_one(a,a==1)||[1].existsOne(a,a==1)"
                .to_owned(),
            "[1].map(a,a)==[1].map(a,true,a)||[1].filter(a,true)==[1]".to_owned(),
            "has(event.data.x)?event.data.x.startsWith('a'):-event.data.y<-2".to_owned(),
            minus.chain(["!false".to_owned()]).collect(),
        ] {
            let filter = Filter::compile(&text, Sees::Subscriber).unwrap();
            let (bytes, nodes) = held(&filter.expression);
            assert!(nodes <= parts(&text), "{text:.80}: {nodes} nodes");
            assert!(bytes <= Filter::memory_of(&text), "{text:.80}: {bytes} bytes");
        }
    }

    #[test]
    fn an_operator_of_two_signs_counts_once() {
        assert_eq!(parts("a&&b||c==d"), 7);
        assert_eq!(parts("a>=b?c<=d:e!=!f"), 11);
        assert_eq!(parts("!!a<-b>c"), 8);
    }
}
