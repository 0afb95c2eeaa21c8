//! The mutants of a file, all of them in one text. A number that a test run names chooses one of them:
//!
//! ```text
//! a < b     →     (if crate::mutant::is(7) { (a) <= (b) } else { (a < b) })
//! ```
//!
//! Nothing in the text moves to another line, so panics and compiler errors name the lines of the file.

use std::collections::HashSet;
use std::ops::Range;

use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};
use syn::{BinOp, Block, Expr, Pat, Signature, Stmt, Type, UnOp};

use crate::values::values;

/// One change of one place.
#[derive(Debug, Clone)]
pub(crate) struct Mutant {
    /// Its number, which chooses it.
    pub(crate) number: u32,
    /// The file, in the tree.
    pub(crate) file: String,
    /// From 1.
    pub(crate) line: usize,
    /// What is changed, on one line.
    pub(crate) before: String,
    pub(crate) after: String,
}

impl Mutant {
    /// What is changed, without the place.
    pub(crate) fn change(&self) -> String {
        let Self { file, before, after, .. } = self;
        format!("{file}\t{before}\t{after}")
    }
}

/// Text that belongs to one mutant, or to all of a place.
struct Insertion {
    at: usize,
    text: String,
    mutant: Option<u32>,
}

/// A file with all its mutants.
pub(crate) struct Mutated {
    pub(crate) text: String,
    pub(crate) mutants: Vec<Mutant>,
    /// Where the text of each mutant is.
    pub(crate) places: Vec<(Range<usize>, u32)>,
    /// The number of the first mutant of the next file.
    pub(crate) next: u32,
}

/// Makes the mutants of a file. The first one has the number `first`. Those whose change is in `dropped`
/// are left out, and keep their numbers.
///
/// # Errors
/// If the text is not Rust.
pub(crate) fn mutate(
    file: &str,
    text: &str,
    first: u32,
    dropped: &HashSet<String>,
) -> syn::Result<Mutated> {
    let parsed = syn::parse_file(text)?;
    let mut maker =
        Maker { file, text, next: first, dropped, mutants: Vec::new(), insertions: Vec::new() };
    maker.visit_file(&parsed);
    let Maker { mutants, mut insertions, next, .. } = maker;
    // Insertions at the same place keep their order: the outer ones come first at a start, and last at an
    // end.
    insertions.sort_by_key(|insertion| insertion.at);
    let (mut out, mut places, mut from) = (String::with_capacity(text.len() * 4), Vec::new(), 0);
    for Insertion { at, text: inserted, mutant } in insertions {
        out.push_str(&text[from..at]);
        from = at;
        let start = out.len();
        out.push_str(&inserted);
        places.extend(mutant.map(|number| (start..out.len(), number)));
    }
    out.push_str(&text[from..]);
    Ok(Mutated { text: out, mutants, places, next })
}

struct Maker<'a> {
    file: &'a str,
    text: &'a str,
    next: u32,
    dropped: &'a HashSet<String>,
    mutants: Vec<Mutant>,
    insertions: Vec<Insertion>,
}

impl Maker<'_> {
    /// The text, without line breaks and comments.
    fn plain(&self, range: Range<usize>) -> String {
        let lines = self.text[range].lines().map(|line| {
            let code = line.split_once("// ").map_or(line, |(code, _)| code);
            code.trim()
        });
        lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
    }

    /// Notes a mutant. `None` if it is left out.
    fn mutant(&mut self, at: usize, before: &str, after: &str) -> Option<u32> {
        let number = self.next;
        self.next += 1;
        let line = self.text[..at].matches('\n').count() + 1;
        let short = |text: &str| text.chars().take(120).collect::<String>();
        let (before, after) = (short(before), short(after));
        let mutant = Mutant { number, file: self.file.to_owned(), line, before, after };
        if self.dropped.contains(&mutant.change()) {
            return None;
        }
        self.mutants.push(mutant);
        Some(number)
    }

    fn insert(&mut self, at: usize, text: impl Into<String>, mutant: Option<u32>) {
        self.insertions.push(Insertion { at, text: text.into(), mutant });
    }

    /// Chooses between these texts and what is at this place. `rest` visits what is there.
    fn choose(&mut self, range: &Range<usize>, others: &[String], rest: impl FnOnce(&mut Self)) {
        let before = self.plain(range.clone());
        let mut made = false;
        for other in others {
            let Some(number) = self.mutant(range.start, &before, other) else { continue };
            let open = if made { "" } else { "(" };
            let text = format!("{open}if crate::mutant::is({number}) {{ {other} }} else ");
            self.insert(range.start, text, Some(number));
            made = true;
        }
        if made {
            self.insert(range.start, "{ (", None);
        }
        rest(self);
        if made {
            self.insert(range.end, ") })", None);
        }
    }

    /// Executes a statement unless the mutant leaves it out.
    fn leave_out(&mut self, range: &Range<usize>, rest: impl FnOnce(&mut Self)) {
        let before = self.plain(range.clone());
        let number = self.mutant(range.start, &before, "");
        if let Some(number) = number {
            let text = format!("if !crate::mutant::is({number}) {{ ");
            self.insert(range.start, text, Some(number));
        }
        rest(self);
        if number.is_some() {
            self.insert(range.end, " }", None);
        }
    }

    fn function(&mut self, sig: &Signature, block: &Block) {
        if sig.constness.is_some() || sig.ident == "fmt" || block.stmts.is_empty() {
            return;
        }
        let name = sig.ident.to_string();
        let at = block.brace_token.span.open().byte_range().end;
        for value in values(&sig.output) {
            let body = self.plain(block.span().byte_range());
            // It does that already.
            if body == format!("{{ {value} }}") {
                continue;
            }
            let Some(number) = self.mutant(at, &format!("fn {name}"), &format!("return {value}"))
            else {
                continue;
            };
            let text = format!(" if crate::mutant::is({number}) {{ return {value}; }}");
            self.insert(at, text, Some(number));
        }
        visit::visit_block(self, block);
    }

    /// The texts that replace an expression with two operands.
    fn others(&self, left: &Expr, op: &BinOp, right: &Expr) -> Vec<String> {
        let signs: &[&str] = match op {
            BinOp::Lt(_) => &["<=", ">="],
            BinOp::Le(_) => &["<", ">"],
            BinOp::Gt(_) => &[">=", "<="],
            BinOp::Ge(_) => &[">", "<"],
            BinOp::Eq(_) => &["!="],
            BinOp::Ne(_) => &["=="],
            BinOp::And(_) => &["||"],
            BinOp::Or(_) => &["&&"],
            BinOp::Add(_) | BinOp::Mul(_) => &["-"],
            BinOp::Sub(_) | BinOp::Div(_) => &["+"],
            BinOp::Rem(_) => &["*"],
            BinOp::BitAnd(_) => &["|"],
            BinOp::BitOr(_) => &["&"],
            BinOp::AddAssign(_) => &["-="],
            BinOp::SubAssign(_) => &["+="],
            _ => &[],
        };
        let (left, right) =
            (self.plain(left.span().byte_range()), self.plain(right.span().byte_range()));
        // Both operands as they are, whatever binds stronger in the new expression.
        signs.iter().map(|sign| format!("({left}) {sign} ({right})")).collect()
    }
}

impl<'ast> Visit<'ast> for Maker<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        use syn::Item;
        let attrs = match item {
            Item::Mod(it) => &it.attrs,
            Item::Fn(it) => &it.attrs,
            Item::Impl(it) => {
                let of = it.trait_.as_ref().and_then(|(path, _)| path.segments.last());
                if of.is_some_and(|of| of.ident == "Debug" || of.ident == "Display") {
                    return;
                }
                &it.attrs
            }
            Item::Trait(it) => &it.attrs,
            // Constants are evaluated by the compiler.
            _ => return,
        };
        if !is_test(attrs) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        self.function(&function.sig, &function.block);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        if !is_test(&function.attrs) {
            self.function(&function.sig, &function.block);
        }
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        if let Some(block) = &function.default {
            self.function(&function.sig, block);
        }
    }

    fn visit_impl_item_const(&mut self, _: &'ast syn::ImplItemConst) {}
    fn visit_trait_item_const(&mut self, _: &'ast syn::TraitItemConst) {}
    fn visit_type(&mut self, _: &'ast Type) {}
    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
    fn visit_generic_argument(&mut self, _: &'ast syn::GenericArgument) {}
    fn visit_expr_const(&mut self, _: &'ast syn::ExprConst) {}

    fn visit_pat(&mut self, pat: &'ast Pat) {
        // Everything else in a pattern is a constant.
        if let Pat::Guard(guarded) = pat {
            let range = guarded.guard.span().byte_range();
            if has_let(&guarded.guard) {
                visit::visit_expr(self, &guarded.guard);
            } else {
                let others = ["true".to_owned(), "false".to_owned()];
                self.choose(&range, &others, |maker| maker.visit_expr(&guarded.guard));
            }
        }
    }

    fn visit_stmt(&mut self, statement: &'ast Stmt) {
        match statement {
            Stmt::Expr(expr, Some(_)) if is_call(expr) => {
                let range = statement.span().byte_range();
                let text = &self.text[range.clone()];
                if text.contains("metrics::") || text.contains("counter!") {
                    visit::visit_stmt(self, statement);
                } else {
                    self.leave_out(&range, |maker| visit::visit_stmt(maker, statement));
                }
            }
            _ => visit::visit_stmt(self, statement),
        }
    }

    fn visit_expr_match(&mut self, matching: &'ast syn::ExprMatch) {
        self.visit_expr(&matching.expr);
        let has_rest = matching.arms.last().is_some_and(|arm| matches!(arm.pat, Pat::Wild(_)));
        for arm in &matching.arms {
            // Without the arm, the last one applies.
            let guarded = matches!(arm.pat, Pat::Guard(_) | Pat::Wild(_));
            if has_rest && !guarded {
                let range = arm.pat.span().byte_range();
                let before = format!("{} => …", self.plain(range.clone()));
                if let Some(number) = self.mutant(range.start, &before, "") {
                    let text = format!(" if !crate::mutant::is({number})");
                    self.insert(range.end, text, Some(number));
                }
            }
            self.visit_arm(arm);
        }
    }

    fn visit_expr(&mut self, expr: &'ast Expr) {
        let range = expr.span().byte_range();
        match expr {
            Expr::Binary(binary) if !has_let(expr) => {
                let others = self.others(&binary.left, &binary.op, &binary.right);
                self.choose(&range, &others, |maker| visit::visit_expr(maker, expr));
            }
            Expr::Unary(unary) if !has_let(expr) && !matches!(unary.op, UnOp::Deref(_)) => {
                let is_number = matches!(*unary.expr, Expr::Lit(_));
                let others = [format!("({})", self.plain(unary.expr.span().byte_range()))];
                // A literal below zero may be the least number.
                let others = if is_number { &others[..0] } else { &others[..] };
                self.choose(&range, others, |maker| visit::visit_expr(maker, expr));
            }
            _ => visit::visit_expr(self, expr),
        }
    }
}

/// A call whose result, if any, is dropped.
fn is_call(expr: &Expr) -> bool {
    match expr {
        Expr::Call(_) | Expr::MethodCall(_) => true,
        Expr::Await(it) => is_call(&it.base),
        Expr::Try(it) => is_call(&it.expr),
        _ => false,
    }
}

/// Whether a condition binds names, outside blocks.
fn has_let(expr: &Expr) -> bool {
    match expr {
        Expr::Let(_) => true,
        Expr::Binary(it) => has_let(&it.left) || has_let(&it.right),
        Expr::Unary(it) => has_let(&it.expr),
        Expr::Paren(it) => has_let(&it.expr),
        _ => false,
    }
}

fn is_test(attrs: &[syn::Attribute]) -> bool {
    attrs.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || (attribute.path().is_ident("cfg")
                && attribute
                    .parse_args::<syn::Ident>()
                    .is_ok_and(|name| name == "test" || name == "fuzzing"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes(text: &str) -> Vec<(String, String)> {
        let mutated = mutate("a.rs", text, 1, &HashSet::new()).unwrap();
        syn::parse_file(&mutated.text).unwrap();
        mutated.mutants.into_iter().map(|it| (it.before, it.after)).collect()
    }

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|&(a, b)| (a.to_owned(), b.to_owned())).collect()
    }

    #[test]
    fn operators_calls_arms_guards_and_values_are_changed() {
        let text =
            "fn f(a: u8) -> Foo<'_> { g(a); match a { 1 => x(), n if !n => y, _ => a + 1 } }";
        let expected = [
            ("g(a);", ""),
            ("1 => …", ""),
            ("!n", "true"),
            ("!n", "false"),
            ("!n", "(n)"),
            ("a + 1", "(a) - (1)"),
        ];
        let of = |list: Vec<(String, String)>| -> Vec<(String, String)> {
            list.into_iter().filter(|(before, _)| !before.starts_with("fn ")).collect()
        };
        assert_eq!(of(changes(text)), pairs(&expected));
        let values = changes("fn f() -> bool { a && b }");
        let expected =
            [("fn f", "return true"), ("fn f", "return false"), ("a && b", "(a) || (b)")];
        assert_eq!(values, pairs(&expected));
    }

    #[test]
    fn tests_constants_and_bindings_are_not_changed() {
        for text in [
            "#[cfg(test)] mod tests { fn f() -> bool { a == b } }",
            "const A: u8 = 1 + 2;",
            "const fn f() -> u8 { 1 + 2 }",
            "impl Debug for A { fn fmt(&self) -> bool { a == b } }",
        ] {
            assert_eq!(changes(text), [], "{text}");
        }
        let binding = "fn f() { if let Some(x) = a && x == 1 { } }";
        let expected = [("fn f", "return ()"), ("x == 1", "(x) != (1)")];
        assert_eq!(changes(binding), pairs(&expected));
    }

    #[test]
    fn a_mutant_that_is_left_out_changes_no_number() {
        let text = "fn f() -> bool { a == b }";
        let changes = ["true", "false"].map(|value| format!("a.rs\tfn f\treturn {value}"));
        let mutated = mutate("a.rs", text, 5, &HashSet::from(changes)).unwrap();
        let numbers: Vec<u32> = mutated.mutants.iter().map(|it| it.number).collect();
        assert_eq!(numbers, [7]);
        let (place, number) = &mutated.places[0];
        assert_eq!(*number, 7);
        assert_eq!(
            mutated.text,
            "fn f() -> bool { (if crate::mutant::is(7) { (a) != (b) } else { (a == b) }) }"
        );
        assert!(mutated.text[place.clone()].contains("!="));
    }
}
