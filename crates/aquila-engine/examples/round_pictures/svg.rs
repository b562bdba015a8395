//! What all pictures are made of: SVG without scripts that reads on light and on dark pages.

use std::fmt::Write;

use tokenizers::Tokenizer;

/// An SVG that grows.
pub struct Picture {
    width: f64,
    height: f64,
    body: String,
}

const STYLE: &str = "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;\
fill:#1f2328}.note{font-family:system-ui,sans-serif;fill:#59636e}.axis{stroke:#b7bdc4}\
.bonus{fill:#ddf4ff;stroke:#0969da}.yes{fill:#dafbe1;stroke:#1a7f37}.no{fill:none;stroke:#b7bdc4}\
.next{fill:none;stroke:#0969da;stroke-dasharray:4 3}.edge{fill:none;stroke:#b7bdc4}\
.way{fill:none;stroke:#1a7f37;stroke-width:2}.gone{fill:#818b98}.c0{--c:#0969da}.c1{--c:#bc4c00}\
.c2{--c:#1a7f37}.c3{--c:#8250df}.c4{--c:#bf3989}.line{fill:none;stroke:var(--c);stroke-width:2}\
.fill{fill:var(--c)}@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9198a1}\
.axis,.no,.edge{stroke:#59636e}.bonus{fill:#121d2f;stroke:#58a6ff}.yes{fill:#12261e;stroke:#3fb950}\
.next{stroke:#58a6ff}.way{stroke:#3fb950}.gone{fill:#818b98}.c0{--c:#58a6ff}.c1{--c:#f0883e}\
.c2{--c:#3fb950}.c3{--c:#bc8cff}.c4{--c:#f778ba}}";

impl Picture {
    /// An empty one; `says` is what it shows, for those who cannot see it.
    pub fn new(width: f64, height: f64, says: &str) -> Self {
        let body = format!("<title>{}</title><style>{STYLE}</style>\n", escaped(says));
        Self { width, height, body }
    }

    /// Text that begins at a place.
    pub fn text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        self.put(format_args!(
            "<text x=\"{x}\" y=\"{y}\" class=\"{class}\">{}</text>",
            escaped(text)
        ));
    }

    /// Text around a place.
    pub fn centred(&mut self, x: f64, y: f64, class: &str, text: &str) {
        let text = escaped(text);
        self.put(format_args!(
            "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\" class=\"{class}\">{text}</text>"
        ));
    }

    /// A rectangle with round corners.
    pub fn rect(&mut self, x: f64, y: f64, width: f64, height: f64, class: &str) {
        self.put(format_args!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width:.1}\" height=\"{height}\" rx=\"4\" \
             class=\"{class}\"/>"
        ));
    }

    /// A path in SVG's own form.
    pub fn path(&mut self, points: &str, class: &str) {
        self.put(format_args!("<path d=\"{points}\" class=\"{class}\"/>"));
    }

    /// A dot.
    pub fn dot(&mut self, x: f64, y: f64, class: &str) {
        self.put(format_args!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" class=\"{class}\"/>"));
    }

    fn put(&mut self, what: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.body, "{what}");
    }

    /// The file.
    pub fn finish(self) -> String {
        let Self { width, height, body } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             width=\"{width}\" height=\"{height}\" role=\"img\">{body}</svg>\n"
        )
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A token's text as it is drawn: spaces and line ends are visible.
pub fn shown(tokenizer: &Tokenizer, id: u32) -> String {
    let text = tokenizer.decode(&[id], false).unwrap_or_default();
    text.replace(' ', "·").replace('\n', "↵").replace('\t', "→")
}

/// How wide a box for such a text is.
pub fn width_of(text: &str) -> f64 {
    text.chars().count() as f64 * 7.9 + 14.0
}
