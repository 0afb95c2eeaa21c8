//! The values that a function returns instead of its own, by its type.

use syn::{GenericArgument, Path, PathArguments, ReturnType, Type};

/// What replaces the body of a function with this result. The compiler sorts out what does not fit.
pub(crate) fn values(output: &ReturnType) -> Vec<String> {
    match output {
        ReturnType::Default => vec!["()".to_owned()],
        ReturnType::Type(_, of) => of_type(of),
    }
}

fn of_type(of: &Type) -> Vec<String> {
    match of {
        Type::Tuple(tuple) if tuple.elems.is_empty() => vec!["()".to_owned()],
        Type::Path(path) => of_path(&path.path),
        Type::Reference(it) => match &*it.elem {
            Type::Path(path) if path.path.is_ident("str") => vec!["\"\"".to_owned()],
            Type::Slice(_) => vec!["&[]".to_owned()],
            _ => Vec::new(),
        },
        _ => Vec::new(),
    }
}

fn of_path(path: &Path) -> Vec<String> {
    let Some(last) = path.segments.last() else { return Vec::new() };
    let inner = || inner(&last.arguments);
    let own = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect();
    match last.ident.to_string().as_str() {
        "bool" => own(&["true", "false"]),
        "u8" | "u16" | "u32" | "u64" | "u128" | "usize" | "i8" | "i16" | "i32" | "i64" | "i128"
        | "isize" => own(&["0", "1"]),
        "f32" | "f64" => own(&["0.0", "1.0"]),
        "Option" => {
            let some = inner().map(|value| format!("Some({value})"));
            [own(&["None"]), some.collect()].concat()
        }
        // Its parts are values only if the function is a method of the type itself.
        "Result" => inner().map(|value| format!("Ok({value})")).collect(),
        "Duration" => own(&["std::time::Duration::ZERO"]),
        // It would never end, or say nothing.
        "Self" | "Instant" | "Router" | "Response" => Vec::new(),
        _ => own(&["Default::default()"]),
    }
}

/// The values of the first type between the brackets.
fn inner(arguments: &PathArguments) -> impl Iterator<Item = String> + use<> {
    let first = match arguments {
        PathArguments::AngleBracketed(list) => list.args.first(),
        _ => None,
    };
    let values = match first {
        Some(GenericArgument::Type(of)) => of_type(of),
        _ => Vec::new(),
    };
    values.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_has_the_values_that_are_likely_to_differ() {
        let of = |text: &str| {
            let signature: syn::Signature = syn::parse_str(text).unwrap();
            values(&signature.output)
        };
        assert_eq!(of("fn f()"), ["()"]);
        assert_eq!(of("fn f() -> bool"), ["true", "false"]);
        assert_eq!(of("fn f() -> Option<u64>"), ["None", "Some(0)", "Some(1)"]);
        assert_eq!(of("fn f() -> Result<(), E>"), ["Ok(())"]);
        assert_eq!(of("fn f() -> &str"), ["\"\""]);
        assert_eq!(of("fn f() -> Vec<A>"), ["Default::default()"]);
        assert_eq!(of("fn f() -> impl Future<Output = ()>"), Vec::<String>::new());
    }
}
