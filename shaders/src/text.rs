//! Indented lines and blocks of text, for the generators.

/// A text that is written line by line.
#[derive(Debug, Default)]
pub(crate) struct Text {
    out: String,
    depth: usize,
}

impl Text {
    /// One line, or none where `line` is empty.
    pub(crate) fn line(&mut self, line: impl AsRef<str>) {
        let line = line.as_ref();
        if line.is_empty() {
            self.out.push('\n');
            return;
        }
        for _ in 0..self.depth {
            self.out.push_str("    ");
        }
        self.out.push_str(line);
        self.out.push('\n');
    }

    /// Several lines at the present depth; their own indentation is kept.
    pub(crate) fn lines(&mut self, lines: &str) {
        for line in lines.trim_matches('\n').lines() {
            self.line(line);
        }
    }

    /// `head { … }`, the inner lines written by `body`.
    pub(crate) fn block(&mut self, head: impl AsRef<str>, body: impl FnOnce(&mut Self)) {
        self.line(format!("{} {{", head.as_ref()));
        self.depth += 1;
        body(self);
        self.depth -= 1;
        self.line("}");
    }

    pub(crate) fn finish(self) -> String {
        self.out
    }
}
