//! Access lists of Windows, in the text form of the system (SDDL).

/// The list of a file of which `owner`, the system and administrators have all rights, and nobody
/// else any. `flags` are those of each entry: `OICI` on a folder, whose files inherit the list.
pub(crate) fn of_owner(owner: &str, flags: &str) -> String {
    format!("D:P(A;{flags};FA;;;{owner})(A;{flags};FA;;;SY)(A;{flags};FA;;;BA)")
}

/// The owner in a security descriptor.
pub(crate) fn owner(descriptor: &str) -> Option<&str> {
    let text = descriptor.strip_prefix("O:")?;
    // The parts follow each other without a separator: `O:…G:…D:…`.
    let end = ["G:", "D:", "S:"].iter().filter_map(|part| text.find(part)).min().unwrap_or(text.len());
    Some(&text[..end]).filter(|owner| !owner.is_empty())
}

/// Who has a right to the object besides its owner, the system and administrators: the first such
/// entry, as the system writes it. A descriptor that cannot be understood counts as one that lets
/// everybody in.
pub(crate) fn other(descriptor: &str) -> Option<String> {
    let everyone = || Some("everyone".to_owned());
    let Some(start) = descriptor.find("D:") else { return everyone() };
    let list = &descriptor[start + "D:".len()..];
    if list.starts_with("NO_ACCESS_CONTROL") {
        return everyone();
    }
    let may = [owner(descriptor), Some("SY"), Some("BA"), Some("OW")];
    for entry in entries(list) {
        let fields: Vec<&str> = entry.splitn(7, ';').collect();
        let [kind, flags, _rights, _object, _inherited, who, ..] = fields.as_slice() else {
            return everyone();
        };
        // Of the kinds of entries those that allow end in A; D denies. IO: for objects inside only.
        let allows = kind.ends_with('A');
        let here = !flags.as_bytes().chunks(2).any(|flag| flag == b"IO");
        if allows && here && !may.contains(&Some(*who)) {
            return Some((*who).to_owned());
        }
    }
    None
}

/// The entries at the beginning of a list, without their outer parentheses. Conditions inside may
/// have their own.
fn entries(list: &str) -> Vec<&str> {
    let Some(start) = list.find('(') else { return Vec::new() };
    let (mut depth, mut from, mut found) = (0_usize, start, Vec::new());
    for (at, letter) in list.bytes().enumerate().skip(start) {
        match letter {
            b'(' => {
                if depth == 0 {
                    from = at + 1;
                }
                depth += 1;
            }
            b')' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    found.push(&list[from..at]);
                }
            }
            // The next part, `S:` with the entries for audits.
            _ if depth == 0 => break,
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: &str = "S-1-5-21-1004336348-1177238915-682003330-1001";

    #[test]
    fn the_list_that_is_written_lets_nobody_else_in() {
        for flags in ["", "OICI"] {
            let descriptor = format!("O:{ME}G:BA{}", of_owner(ME, flags));
            assert_eq!(owner(&descriptor), Some(ME));
            assert_eq!(other(&descriptor), None);
        }
    }

    #[test]
    fn any_right_of_another_user_is_found() {
        let of = |list: &str| other(&format!("O:{ME}G:DUD:{list}"));
        assert_eq!(of(&format!("AI(A;ID;FA;;;SY)(A;ID;FA;;;BA)(A;ID;FA;;;{ME})")), None);
        assert_eq!(of(&format!("AI(A;ID;FA;;;{ME})(A;ID;0x1200a9;;;BU)")), Some("BU".to_owned()));
        assert_eq!(of("P(A;;FR;;;WD)"), Some("WD".to_owned()));
        assert_eq!(of("P(A;;FA;;;S-1-5-21-1-2-3-1002)"), Some("S-1-5-21-1-2-3-1002".to_owned()));
        // An entry that denies, and one for files inside a folder, give nobody a right to this object.
        assert_eq!(of("P(D;;FA;;;WD)(A;OICIIO;FA;;;WD)(A;;FA;;;OW)"), None);
        // A condition has parentheses of its own.
        assert_eq!(
            of("P(XA;;FX;;;S-1-1-0;(@User.Title==\"PM\" && (@User.Level>2)))"),
            Some("S-1-1-0".to_owned())
        );
        assert_eq!(of("P(A;;FA;;;SY)S:(AU;SAFA;FA;;;WD)"), None);
    }

    #[test]
    fn a_descriptor_that_is_missing_or_damaged_counts_as_open() {
        for text in ["", "O:BAG:BA", "O:BAG:BAD:NO_ACCESS_CONTROL", "O:BAG:BAD:P(A;;FA)"] {
            assert_eq!(other(text), Some("everyone".to_owned()), "{text}");
        }
        // An empty list gives nobody a right.
        assert_eq!(other("O:BAG:BAD:P"), None);
        assert_eq!(owner("D:P"), None);
    }
}
