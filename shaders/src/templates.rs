//! The templates of `shaders/wgsl/`, which make the text of every kernel.

use std::sync::LazyLock;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, UndefinedBehavior};

macro_rules! templates {
    ($($path:literal,)*) => {
        &[$(($path, include_str!(concat!("../wgsl/", $path))),)*]
    };
}

/// Path below `shaders/wgsl/`, which is the name by which templates include each other, and text.
const TEMPLATES: &[(&str, &str)] = templates![
    "attend/item.wgsl",
    "attend/matrix.wgsl",
    "attend/odd_values.wgsl",
    "attend/portable.wgsl",
    "attend/run.wgsl",
    "attend/subgroup.wgsl",
    "backward/every_run.wgsl",
    "backward/item.wgsl",
    "backward/lanes.wgsl",
    "backward/matrix.wgsl",
    "backward/odd_elements.wgsl",
    "backward/odd_rows.wgsl",
    "backward/portable.wgsl",
    "backward/row_stats.wgsl",
    "backward/shares.wgsl",
    "decode/item.wgsl",
    "decode/lanes.wgsl",
    "decode/merge_parts.wgsl",
    "decode/portable.wgsl",
    "decode/run.wgsl",
    "decode/unseen.wgsl",
    "decode/visible.wgsl",
    "parts/bias.wgsl",
    "parts/code_group.wgsl",
    "parts/element.wgsl",
    "parts/finite.wgsl",
    "parts/interface.wgsl",
    "parts/load.wgsl",
    "parts/logits.wgsl",
    "parts/round.wgsl",
    "parts/odd.wgsl",
    "parts/row_head.wgsl",
    "parts/texel.wgsl",
    "parts/thread.wgsl",
    "parts/unpack.wgsl",
    "parts/weight.wgsl",
    "state/finalize.wgsl",
    "state/merge.wgsl",
    "state/reset.wgsl",
    "tensors/convert.wgsl",
    "tensors/from_codes.wgsl",
    "tensors/strided.wgsl",
    "tensors/to_codes.wgsl",
];

/// All templates, parsed at their first use. A name that a template uses and that has no value is
/// an error; nothing is escaped; lines with nothing but a statement leave no line.
static ENVIRONMENT: LazyLock<Environment<'static>> =
    LazyLock::new(|| parsed().unwrap_or_else(|error| panic!("a template of shaders/wgsl: {error:#}")));

fn parsed() -> Result<Environment<'static>, Error> {
    let syntax =
        SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(true).build()?;
    let mut environment = Environment::new();
    environment.set_syntax(syntax);
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.add_function("range", |first: u32, end: Option<u32>| {
        let (first, end) = end.map_or((0, first), |end| (first, end));
        (first..end).collect::<Vec<u32>>()
    });
    for (path, text) in TEMPLATES {
        environment.add_template(path, text)?;
    }
    Ok(environment)
}

/// The text that a template makes of values.
///
/// # Panics
/// On a fault of the template. The tests render the whole catalogue, so that they find it.
pub(crate) fn render(template: &str, values: Value) -> String {
    ENVIRONMENT
        .get_template(template)
        .and_then(|found| found.render(values))
        .unwrap_or_else(|error| panic!("shaders/wgsl/{template}: {error:#}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::TEMPLATES;

    #[test]
    fn every_file_of_the_folder_is_a_template() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("wgsl");
        let mut files = BTreeSet::new();
        for folder in std::fs::read_dir(&root).unwrap() {
            let folder = folder.unwrap().file_name().into_string().unwrap();
            for file in std::fs::read_dir(root.join(&folder)).unwrap() {
                files.insert(format!("{folder}/{}", file.unwrap().file_name().into_string().unwrap()));
            }
        }
        assert_eq!(files, TEMPLATES.iter().map(|(path, _)| (*path).to_owned()).collect());
    }
}
