//! Checks an expression: its depth, its names, its regular expressions, its cost.

use cel::common::ast::{ComprehensionExpr, EntryExpr, Expr, IdedExpr, LiteralValue, SourceInfo};

use super::{FILTER_MAX_DEPTH, FILTER_MAX_MACROS, FilterError, Position, Sees, Shape, regex};

/// Types have no value, but expressions can compare with them.
const TYPES: [&str; 11] =
    ["bool", "bytes", "double", "dyn", "int", "list", "map", "null_type", "string", "type", "uint"];

/// Functions. Operators have their sign in the name.
const FUNCTIONS: [&str; 32] = [
    "bool",
    "bytes",
    "contains",
    "double",
    "duration",
    "dyn",
    "endsWith",
    "getDate",
    "getDayOfMonth",
    "getDayOfWeek",
    "getDayOfYear",
    "getFullYear",
    "getHours",
    "getMilliseconds",
    "getMinutes",
    "getMonth",
    "getSeconds",
    "hasValue",
    "int",
    "matches",
    "max",
    "min",
    "or",
    "orValue",
    "size",
    "startsWith",
    "string",
    "timestamp",
    "type",
    "uint",
    "value",
    "has",
];

/// Walks a tree and collects its depth, its names and its shape.
pub(super) struct Walk<'a> {
    pub(super) text: &'a str,
    pub(super) source: &'a SourceInfo,
    pub(super) sees: Sees,
    /// Names that the surrounding macros define.
    pub(super) names: Vec<String>,
    pub(super) shape: Shape,
    /// Whether this is the part of a `map` that makes the new entries.
    pub(super) in_map: bool,
}

/// Whether a macro is `map`, which makes new entries.
fn is_map(over: &ComprehensionExpr) -> bool {
    // `filter` adds the entry itself.
    adds_of(&over.loop_step.expr)
        .is_some_and(|added| !matches!(&added.expr, Expr::Ident(name) if *name == over.iter_var))
        && matches!(over.accu_init.expr, Expr::List(_))
}

/// The expression that a macro adds to its list for each entry.
fn adds_of(step: &Expr) -> Option<&IdedExpr> {
    let Expr::Call(call) = step else { return None };
    match &*call.func_name {
        "_+_" => match call.args.get(1).map(|added| &added.expr) {
            Some(Expr::List(list)) => list.elements.first(),
            _ => None,
        },
        "_?_:_" => call.args.get(1).and_then(|then| adds_of(&then.expr)),
        _ => None,
    }
}

/// Whether the expression contains a `map` whose entries may be larger than those of its source.
fn grows(expr: &Expr) -> bool {
    let any = |parts: &[IdedExpr]| parts.iter().any(|part| grows(&part.expr));
    match expr {
        Expr::Select(select) => grows(&select.operand.expr),
        Expr::Call(call) => {
            any(&call.args) || call.target.as_ref().is_some_and(|target| grows(&target.expr))
        }
        Expr::List(list) => any(&list.elements),
        Expr::Comprehension(over) => {
            let made = adds_of(&over.loop_step.expr).map(|added| &added.expr);
            (is_map(over) && made.is_some_and(makes_more)) || grows(&over.iter_range.expr)
        }
        _ => false,
    }
}

/// Whether the expression builds a larger value.
fn makes_more(expr: &Expr) -> bool {
    match expr {
        Expr::Select(select) => makes_more(&select.operand.expr),
        Expr::Call(call) => {
            call.func_name == "_+_"
                || call.args.iter().any(|part| makes_more(&part.expr))
                || call.target.as_ref().is_some_and(|target| makes_more(&target.expr))
        }
        Expr::List(_) | Expr::Map(_) | Expr::Struct(_) | Expr::Comprehension(_) => true,
        _ => false,
    }
}

/// The cost of one evaluation of a regular expression, in steps.
fn regex_steps(pattern: Option<&IdedExpr>) -> Result<u64, FilterError> {
    let Some(Expr::Literal(LiteralValue::String(text))) = pattern.map(|pattern| &pattern.expr)
    else {
        let problem = "is no text; write it out, so that it is known before it runs";
        return Err(FilterError::Regex(problem.to_owned()));
    };
    regex::cost(text.inner()).map_err(FilterError::Regex)
}

impl Walk<'_> {
    pub(super) fn visit(
        &mut self,
        node: &IdedExpr,
        depth: usize,
        macros: usize,
    ) -> Result<(), FilterError> {
        if depth > FILTER_MAX_DEPTH {
            return Err(FilterError::TooDeep);
        }
        self.shape.nodes[macros] += 1;
        let deeper = depth + 1;
        match &node.expr {
            Expr::Unspecified | Expr::Literal(_) => Ok(()),
            Expr::Ident(name) => self.name(node, name),
            Expr::Select(select) => self.visit(&select.operand, deeper, macros),
            Expr::Call(call) => {
                let name = &*call.func_name;
                let is_named = name.starts_with(|first: char| first.is_ascii_alphabetic());
                if is_named && !FUNCTIONS.contains(&name) {
                    return Err(self.unknown(node, name));
                }
                if call.func_name == "matches" {
                    self.shape.nodes[macros] += regex_steps(call.args.last())?;
                }
                self.shape.additions += usize::from(call.func_name == "_+_");
                let target = call.target.as_deref();
                target.into_iter().chain(&call.args).try_for_each(|part| {
                    // In `a && b && c`, all parts have the same depth: the text shows no nesting.
                    let chained = matches!(&part.expr, Expr::Call(inner)
                        if inner.func_name == call.func_name
                            && matches!(&*call.func_name, "_&&_" | "_||_"));
                    self.visit(part, if chained { depth } else { deeper }, macros)
                })
            }
            Expr::List(list) => {
                self.shape.longest = self.shape.longest.max(list.elements.len());
                list.elements.iter().try_for_each(|part| self.visit(part, deeper, macros))
            }
            Expr::Map(map) => {
                self.shape.longest = self.shape.longest.max(map.entries.len());
                map.entries.iter().try_for_each(|entry| self.entry(&entry.expr, deeper, macros))
            }
            Expr::Struct(made) => {
                made.entries.iter().try_for_each(|entry| self.entry(&entry.expr, deeper, macros))
            }
            Expr::Comprehension(over) => {
                if macros == FILTER_MAX_MACROS {
                    return Err(FilterError::Macros);
                }
                let is_map = is_map(over);
                if is_map && self.in_map || grows(&over.iter_range.expr) {
                    return Err(FilterError::Grows);
                }
                self.visit(&over.iter_range, deeper, macros)?;
                let within = self.in_map;
                self.in_map |= is_map;
                self.visit(&over.accu_init, deeper, macros)?;
                let known = self.names.len();
                self.names.extend([over.iter_var.clone(), over.accu_var.clone()]);
                self.names.extend(over.iter_var2.clone());
                // A macro that builds a list adds to its own list; this addition does not count.
                let additions = self.shape.additions;
                for part in [&over.loop_cond, &over.loop_step, &over.result] {
                    self.visit(part, deeper, macros + 1)?;
                }
                if matches!(over.accu_init.expr, Expr::List(_)) {
                    self.shape.additions = self.shape.additions.max(additions + 1) - 1;
                }
                self.names.truncate(known);
                self.in_map = within;
                Ok(())
            }
        }
    }

    fn entry(&mut self, entry: &EntryExpr, depth: usize, macros: usize) -> Result<(), FilterError> {
        match entry {
            EntryExpr::StructField(field) => self.visit(&field.value, depth, macros),
            EntryExpr::MapEntry(entry) => {
                self.visit(&entry.key, depth, macros)?;
                self.visit(&entry.value, depth, macros)
            }
        }
    }

    fn name(&self, node: &IdedExpr, name: &str) -> Result<(), FilterError> {
        let known = self.names.iter().any(|known| known == name)
            || self.sees.names().contains(&name)
            || TYPES.contains(&name);
        if known {
            return Ok(());
        }
        Err(self.unknown(node, name))
    }

    fn unknown(&self, node: &IdedExpr, name: &str) -> FilterError {
        let begin = self.source.offset_for(node.id).map_or(0, |(start, _)| start as usize);
        // The position of a call is that of its bracket, the position of a name is its first
        // character.
        let (before, after): (String, String) =
            (self.text.chars().take(begin).collect(), self.text.chars().skip(begin).collect());
        let offset = match before.rfind(name).filter(|_| !after.starts_with(name)) {
            Some(at) => before[..at].chars().count(),
            None => begin,
        };
        let at = Position::of(self.text, offset);
        FilterError::Unknown { name: name.to_owned(), at, known: self.sees.spoken() }
    }
}
