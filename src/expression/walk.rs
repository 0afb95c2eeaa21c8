//! Checks an expression: its depth, its names, its regular expressions, its cost.

use cel::common::ast::{
    CallExpr, ComprehensionExpr, EntryExpr, Expr, IdedExpr, LiteralValue, SourceInfo,
};

use super::volume::Volume;
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

/// Operators that copy their operands: `+` into the sum, all of them into an error.
const COPYING: [&str; 9] = ["_+_", "_-_", "_*_", "_/_", "_%_", "_<_", "_<=_", "_>_", "_>=_"];

/// Operators and functions that give a truth, a number or a type, and no part of their operands.
const SCALAR: [&str; 26] = [
    "!_",
    "-_",
    "_-_",
    "_*_",
    "_/_",
    "_%_",
    "_==_",
    "_!=_",
    "_<_",
    "_<=_",
    "_>_",
    "_>=_",
    "_&&_",
    "_||_",
    "@in",
    "@not_strictly_false",
    "bool",
    "contains",
    "double",
    "endsWith",
    "int",
    "matches",
    "size",
    "startsWith",
    "type",
    "uint",
];

/// A text of so many bytes counts as one more value.
const BYTES_OF_A_VALUE: usize = 64;

/// Walks a tree and collects its depth, its names and its shape.
pub(super) struct Walk<'a> {
    pub(super) text: &'a str,
    pub(super) source: &'a SourceInfo,
    pub(super) sees: Sees,
    /// The variables of the surrounding macros. The last one of a name counts.
    pub(super) variables: Vec<Variable>,
    pub(super) shape: Shape,
    /// Whether this is the part of a `map` that makes the new entries.
    pub(super) in_map: bool,
}

/// A variable of a macro.
pub(super) struct Variable {
    name: String,
    /// Its volume in all rounds of its macro, and the number of macros around its use.
    volume: Volume,
    macros: usize,
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

/// The volume of a literal.
fn of_literal(literal: &LiteralValue, macros: usize) -> Volume {
    let bytes = match literal {
        LiteralValue::String(text) => text.inner().len(),
        LiteralValue::Bytes(bytes) => bytes.inner().len(),
        _ => 0,
    };
    Volume::made(1 + (bytes / BYTES_OF_A_VALUE) as u64, macros)
}

/// Number of operands that a call may copy, from the first one. An index that is no whole number copies the
/// list into an error, and `in` copies what can be no key of a map.
fn copied_operands(call: &CallExpr) -> usize {
    let is_harmless = |index: &IdedExpr| {
        matches!(
            &index.expr,
            Expr::Literal(LiteralValue::Int(_) | LiteralValue::UInt(_) | LiteralValue::String(_))
        )
    };
    match &*call.func_name {
        "@in" => 1,
        "_[_]" if !call.args.get(1).is_some_and(is_harmless) => 2,
        name if COPYING.contains(&name) => 2,
        _ => 0,
    }
}

impl Walk<'_> {
    /// Visits a part whose value is copied. The steps of a literal pay for its copy.
    pub(super) fn copied(
        &mut self,
        part: &IdedExpr,
        depth: usize,
        macros: usize,
    ) -> Result<Volume, FilterError> {
        let volume = self.visit(part, depth, macros)?;
        if !matches!(part.expr, Expr::Literal(_)) {
            self.shape.copies.add(volume.clone());
        }
        Ok(volume)
    }

    /// Visits a part. Returns the volume of its values.
    fn visit(
        &mut self,
        node: &IdedExpr,
        depth: usize,
        macros: usize,
    ) -> Result<Volume, FilterError> {
        if depth > FILTER_MAX_DEPTH {
            return Err(FilterError::TooDeep);
        }
        self.shape.nodes[macros] += 1;
        let deeper = depth + 1;
        let volume: Result<Volume, FilterError> = match &node.expr {
            Expr::Unspecified => Ok(Volume::default()),
            Expr::Literal(literal) => Ok(of_literal(literal, macros)),
            Expr::Ident(name) => self.name(node, name, macros),
            Expr::Select(select) => {
                let of = self.visit(&select.operand, deeper, macros)?;
                Ok(if select.test { Volume::made(1, macros) } else { of })
            }
            Expr::Call(call) => self.call(node, call, depth, macros),
            Expr::List(list) => {
                self.shape.longest = self.shape.longest.max(list.elements.len());
                list.elements.iter().try_fold(Volume::made(1, macros), |all, part| {
                    Ok(all.and(self.copied(part, deeper, macros)?))
                })
            }
            Expr::Map(map) => {
                self.shape.longest = self.shape.longest.max(map.entries.len());
                map.entries.iter().try_fold(Volume::made(1, macros), |all, entry| {
                    Ok(all.and(self.entry(&entry.expr, deeper, macros)?))
                })
            }
            Expr::Struct(made) => {
                made.entries.iter().try_fold(Volume::made(1, macros), |all, entry| {
                    Ok(all.and(self.entry(&entry.expr, deeper, macros)?))
                })
            }
            Expr::Comprehension(over) => self.comprehension(over, deeper, macros),
        };
        let volume = volume?;
        Ok(self.names_of(&node.expr).map_or(volume, |names| Volume::facts(names, macros)))
    }

    /// The names of a value of the facts, such as `event`, `data` and `price`.
    fn names_of(&self, expr: &Expr) -> Option<Vec<String>> {
        let (of, name) = match expr {
            Expr::Ident(name) => return self.is_fact(name).then(|| vec![name.clone()]),
            Expr::Select(select) if !select.test => (&*select.operand, &*select.field),
            Expr::Call(call) if call.func_name == "_[_]" => {
                let [of, index] = &*call.args else { return None };
                let Expr::Literal(LiteralValue::String(name)) = &index.expr else { return None };
                (of, name.inner())
            }
            _ => return None,
        };
        let mut names = self.names_of(&of.expr)?;
        names.push(name.to_owned());
        Some(names)
    }

    /// Whether it is the event or the subscriber, and no variable of this name.
    fn is_fact(&self, name: &str) -> bool {
        self.sees.names().contains(&name)
            && !self.variables.iter().any(|variable| variable.name == name)
    }

    fn call(
        &mut self,
        node: &IdedExpr,
        call: &CallExpr,
        depth: usize,
        macros: usize,
    ) -> Result<Volume, FilterError> {
        let name = &*call.func_name;
        let is_named = name.starts_with(|first: char| first.is_ascii_alphabetic());
        if is_named && !FUNCTIONS.contains(&name) {
            return Err(self.unknown(node, name));
        }
        if name == "matches" {
            self.shape.nodes[macros] += regex_steps(call.args.last())?;
        }
        self.shape.additions += usize::from(name == "_+_");
        let (copied, mut all) = (copied_operands(call), Volume::default());
        for (at, part) in call.target.as_deref().into_iter().chain(&call.args).enumerate() {
            // In `a && b && c`, all parts have the same depth: the text shows no nesting.
            let is_chained = matches!(&part.expr, Expr::Call(inner)
                if inner.func_name == name && matches!(name, "_&&_" | "_||_"));
            let depth = if is_chained { depth } else { depth + 1 };
            all.add(if at < copied {
                self.copied(part, depth, macros)?
            } else {
                self.visit(part, depth, macros)?
            });
        }
        Ok(if SCALAR.contains(&name) { Volume::made(1, macros) } else { all })
    }

    fn comprehension(
        &mut self,
        over: &ComprehensionExpr,
        depth: usize,
        macros: usize,
    ) -> Result<Volume, FilterError> {
        if macros == FILTER_MAX_MACROS {
            return Err(FilterError::Macros);
        }
        let is_map = is_map(over);
        if is_map && self.in_map || grows(&over.iter_range.expr) {
            return Err(FilterError::Grows);
        }
        // Each round copies an entry into the variable.
        let range = self.copied(&over.iter_range, depth, macros)?;
        let within = self.in_map;
        self.in_map |= is_map;
        self.visit(&over.accu_init, depth, macros)?;
        let known = self.variables.len();
        let mut define = |name: &String, volume: Volume| {
            self.variables.push(Variable { name: name.clone(), volume, macros: macros + 1 });
        };
        define(&over.iter_var, range.clone());
        // What the macro collects counts where it is added.
        define(&over.accu_var, Volume::default());
        if let Some(name) = &over.iter_var2 {
            define(name, range);
        }
        // A macro that builds a list adds to its own list; this addition does not count.
        let additions = self.shape.additions;
        let mut made = Volume::default();
        for part in [&over.loop_cond, &over.loop_step, &over.result] {
            made.add(self.visit(part, depth, macros + 1)?);
        }
        self.variables.truncate(known);
        self.in_map = within;
        if matches!(over.accu_init.expr, Expr::List(_)) {
            self.shape.additions = self.shape.additions.max(additions + 1) - 1;
            Ok(made)
        } else {
            Ok(Volume::made(1, macros))
        }
    }

    fn entry(
        &mut self,
        entry: &EntryExpr,
        depth: usize,
        macros: usize,
    ) -> Result<Volume, FilterError> {
        match entry {
            EntryExpr::StructField(field) => self.copied(&field.value, depth, macros),
            EntryExpr::MapEntry(entry) => {
                let key = self.copied(&entry.key, depth, macros)?;
                Ok(key.and(self.copied(&entry.value, depth, macros)?))
            }
        }
    }

    fn name(&self, node: &IdedExpr, name: &str, macros: usize) -> Result<Volume, FilterError> {
        let variable = self.variables.iter().rfind(|variable| variable.name == name);
        if let Some(variable) = variable {
            return Ok(variable.volume.within(macros - variable.macros));
        }
        if self.is_fact(name) {
            return Ok(Volume::facts(vec![name.to_owned()], macros));
        }
        if TYPES.contains(&name) {
            return Ok(Volume::made(1, macros));
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
