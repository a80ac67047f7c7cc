//! Errors of the command-line parser on one line.

use clap::error::ErrorKind;

/// clap's error on one line: the mistake, clap's tips, and where to read more.
pub(crate) fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let mut parts: Vec<&str> = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.starts_with("Usage:") || line.starts_with("For more information") {
            break;
        }
        if !line.is_empty() {
            parts.push(line.strip_prefix("error: ").unwrap_or(line));
        }
    }
    let (first, rest) = parts.split_first().map_or(("", &[][..]), |(first, rest)| (*first, rest));
    let joined = rest.iter().fold(first.to_owned(), |mut all, part| {
        all.push_str(if all.ends_with(':') { " " } else { "; " });
        all.push_str(part);
        all
    });
    match error.kind() {
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand | ErrorKind::MissingRequiredArgument => {
            format!("{joined}; kyklos --help and kyklos <command> --help list what there is")
        }
        _ => joined,
    }
}
