//! What `-h` and `--help` show of the options.

use clap::Command;

/// `command` whose `-h` has one sentence for each option, and `--help` and the man page all of its
/// description. The same for its commands.
pub(crate) fn with_short_help(command: Command) -> Command {
    command
        .mut_args(|arg| {
            let Some(whole) = arg.get_help().map(ToString::to_string) else { return arg };
            let short = first_sentence(&whole);
            match arg.get_long_help() {
                // The parser's own -h and --help.
                Some(_) => arg.help(short),
                None if short == whole => arg,
                None => arg.help(short).long_help(whole),
            }
        })
        .mut_subcommands(with_short_help)
}

/// The first sentence, and the brackets at the end, which say the default or the variable.
fn first_sentence(whole: &str) -> String {
    let Some((sentence, rest)) = whole.split_once(". ") else { return whole.to_owned() };
    match rest.rfind('[') {
        Some(at) if rest.ends_with(']') => format!("{sentence} {}", &rest[at..]),
        _ => sentence.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_short_help_has_the_first_sentence_and_the_default() {
        for (whole, short) in [
            ("Print one JSON object", "Print one JSON object"),
            ("Ulysses x ring, such as 2x4. auto: the best one", "Ulysses x ring, such as 2x4"),
            ("Keep it. Then forget it [default: 200, or 500]", "Keep it [default: 200, or 500]"),
            ("A list, such as 1,2. With [a] it is short", "A list, such as 1,2"),
        ] {
            assert_eq!(first_sentence(whole), short);
        }
    }
}
