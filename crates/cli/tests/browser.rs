//! The page in a headless Chromium: nothing goes wrong, nothing leaves it, and what can be moved moves.
//!
//! Any Chromium of the machine will do. Where there is none, the tests say so and pass. Where `CHROMIUM` names one, as in CI, that
//! one must run. The tests speak to it over a pipe, in the `DevTools` protocol. `SCREENSHOTS=DIR` keeps pictures to look at.

use crate::from_run::{train, with_run};
use crate::watch::Server;
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// How long the browser may take for anything.
const PATIENCE: Duration = Duration::from_mins(1);

struct Browser {
    process: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    session: String,
    num_sent: u64,
    /// What the page said since it was opened: exceptions, errors of the console, requests.
    problems: Vec<String>,
    requests: Vec<String>,
    _profile: tempfile::TempDir,
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The command of a Chromium of this machine; the one that `CHROMIUM` names must run.
fn chromium() -> Option<String> {
    let runs = |name: &String| {
        Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success())
    };
    if let Ok(named) = std::env::var("CHROMIUM") {
        assert!(runs(&named), "CHROMIUM={named}: this program does not run");
        return Some(named);
    }
    ["chromium", "chromium-browser", "google-chrome", "chrome"].map(str::to_owned).into_iter().find(runs)
}

impl Browser {
    #[allow(clippy::print_stderr, reason = "who runs the tests shall know what was not tested")]
    /// `None`, and why on stderr, where the machine has none.
    fn start() -> Option<Self> {
        let Some(name) = chromium() else {
            eprintln!("skipped: this machine has no Chromium (chromium, google-chrome, or CHROMIUM=...)");
            return None;
        };
        let profile = tempfile::tempdir().unwrap();
        // The protocol's two pipes are numbers 3 and 4.
        let script = "exec \"$0\" --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --window-size=1280,900 \
                      --disable-background-networking --disable-component-update --hide-scrollbars \
                      --user-data-dir=\"$1\" --remote-debugging-pipe about:blank 3<&0 4>&1 >/dev/null";
        let mut process = Command::new("sh")
            .args(["-c", script, &name, profile.path().to_str().unwrap()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let to = process.stdin.take().unwrap();
        let mut pipe = BufReader::new(process.stdout.take().unwrap());
        let (sender, from) = channel();
        std::thread::spawn(move || {
            let mut message = Vec::new();
            while pipe.read_until(0, &mut message).is_ok_and(|count| count > 0) {
                message.pop();
                let Ok(value) = serde_json::from_slice(&message) else { break };
                if sender.send(value).is_err() {
                    break;
                }
                message.clear();
            }
        });
        let (session, problems, requests) = (String::new(), Vec::new(), Vec::new());
        let mut browser =
            Self { process, to, from, session, num_sent: 0, problems, requests, _profile: profile };
        let target = browser.ask("Target.createTarget", &json!({"url": "about:blank"}));
        let attached =
            browser.ask("Target.attachToTarget", &json!({"targetId": target["targetId"], "flatten": true}));
        attached["sessionId"].as_str().unwrap().clone_into(&mut browser.session);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.ask(&format!("{domain}.enable"), &json!({}));
        }
        Some(browser)
    }

    fn next(&mut self) -> Value {
        let message = self.from.recv_timeout(PATIENCE).expect("the browser answers");
        let (params, text) = (&message["params"], |value: &Value| value.to_string());
        match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => self.problems.push(text(&params["exceptionDetails"])),
            Some("Runtime.consoleAPICalled") if params["type"] == "error" || params["type"] == "warning" => {
                self.problems.push(text(&params["args"]));
            }
            Some("Log.entryAdded") if params["entry"]["level"] == "error" => {
                self.problems.push(text(&params["entry"]));
            }
            Some("Network.requestWillBeSent") => {
                self.requests.push(params["request"]["url"].as_str().unwrap_or_default().to_owned());
            }
            _ => {}
        }
        message
    }

    fn ask(&mut self, method: &str, params: &Value) -> Value {
        let answer = self.answer(method, params);
        assert!(answer["error"].is_null(), "{method}: {answer}");
        answer["result"].clone()
    }

    /// The result, or the error, with what surrounds it.
    fn answer(&mut self, method: &str, params: &Value) -> Value {
        self.num_sent += 1;
        let id = self.num_sent;
        let mut message = json!({"id": id, "method": method, "params": params});
        if !self.session.is_empty() {
            message["sessionId"] = self.session.clone().into();
        }
        self.to.write_all(message.to_string().as_bytes()).unwrap();
        self.to.write_all(&[0]).unwrap();
        self.to.flush().unwrap();
        loop {
            let answer = self.next();
            if answer["id"] == id {
                return answer;
            }
        }
    }

    fn open(&mut self, url: &str) {
        (self.problems, self.requests) = (Vec::new(), Vec::new());
        self.ask("Page.navigate", &json!({"url": url}));
        while self.next()["method"] != "Page.loadEventFired" {}
    }

    fn value(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.ask("Runtime.evaluate", &asked);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// As `value`, of a page that reloads itself: `None` while it does.
    fn value_between_loads(&mut self, expression: &str) -> Option<Value> {
        let answer =
            self.answer("Runtime.evaluate", &json!({"expression": expression, "returnByValue": true}));
        answer["error"].is_null().then(|| answer["result"]["result"]["value"].clone())
    }

    fn key(&mut self, key: &str) {
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({"type": kind, "key": key});
            if key.chars().count() == 1 && kind == "keyDown" {
                event["text"] = key.into();
            }
            // A slider listens to the number of a key.
            let number = match key {
                "ArrowRight" => 39,
                "ArrowLeft" => 37,
                "PageDown" => 34,
                "PageUp" => 33,
                _ => 0,
            };
            if number > 0 {
                event["windowsVirtualKeyCode"] = number.into();
            }
            self.ask("Input.dispatchKeyEvent", &event);
        }
    }

    fn mouse(&mut self, kind: &str, (x, y): (f64, f64), buttons: u32) {
        let button = if buttons > 0 || kind == "mouseReleased" { "left" } else { "none" };
        let event =
            json!({"type": kind, "x": x, "y": y, "button": button, "buttons": buttons, "clickCount": 1});
        self.ask("Input.dispatchMouseEvent", &event);
    }

    /// Left, top, width and height of an element, which is brought into view and drawn there: the browser looks for
    /// what lies under the mouse in the frame that it drew last.
    fn place(&mut self, selector: &str) -> (f64, f64, f64, f64) {
        let found = self.value(&format!(
            "(() => {{ const e = document.querySelector('{selector}'); e.scrollIntoView({{block: 'center', behavior: \
             'instant'}}); return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => {{ \
             const b = e.getBoundingClientRect(); done([b.left, b.top, b.width, b.height]); }}))); }})()"
        ));
        let number = |at: usize| found[at].as_f64().unwrap();
        (number(0), number(1), number(2), number(3))
    }

    /// What the viewer shows: step, and the ends of its window in nanoseconds.
    fn shown(&mut self) -> (u64, f64, f64) {
        let found = self.value("(() => { const d = document.getElementById('viewer').dataset; return [+d.step, +d.from, +d.to]; })()");
        (found[0].as_u64().unwrap(), found[1].as_f64().unwrap(), found[2].as_f64().unwrap())
    }

    /// Colours of the canvas, by how many of its points have them.
    fn colours(&mut self) -> Vec<String> {
        // Two frames later what was asked for is drawn.
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))");
        let found = self.value(
            "(() => { const c = document.getElementById('viewer-canvas'); const d = c.getContext('2d').getImageData(0, 0, \
             c.width, c.height).data; const n = {}; for (let i = 0; i < d.length; i += 4) { const k = d[i] + ',' + d[i+1] + ',' \
             + d[i+2] + ',' + d[i+3]; n[k] = (n[k] || 0) + 1; } return Object.entries(n).filter(e => e[1] > 500).map(e => e[0]).sort(); })()",
        );
        found.as_array().unwrap().iter().map(|c| c.as_str().unwrap().to_owned()).collect()
    }

    fn scheme(&mut self, name: &str) {
        // A page that glides to where a link led has its parts elsewhere when the mouse gets there.
        let still = json!({"name": "prefers-reduced-motion", "value": "reduce"});
        let features = json!([{"name": "prefers-color-scheme", "value": name}, still]);
        self.ask("Emulation.setEmulatedMedia", &json!({"features": features}));
    }

    fn picture(&mut self, name: &str) {
        let Ok(dir) = std::env::var("SCREENSHOTS") else { return };
        let size =
            self.value("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]");
        let clip = json!({"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1});
        let asked = json!({"format": "png", "captureBeyondViewport": true, "clip": clip});
        let picture = self.ask("Page.captureScreenshot", &asked);
        // Base 64, as the protocol has it: `base64 -d` makes a picture of it.
        fs::write(Path::new(&dir).join(format!("{name}.b64")), picture["data"].as_str().unwrap()).unwrap();
    }
}

/// What is open on the page needs no scrolling.
fn fits_a_screen(browser: &mut Browser) {
    let cut = "[...document.querySelectorAll('.scroll')].filter(s => !s.closest('details:not([open])') && s.scrollWidth > s.clientWidth + \
               1).map(s => s.getAttribute('aria-label'))";
    assert_eq!(browser.value(cut), json!([]), "what does not fit a screen of 1,280 pixels");
}

fn fits_a_phone(browser: &mut Browser) {
    // On a phone the page is as wide as the screen; what is wider scrolls in its own box, and its heading is whole.
    let phone = json!({"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": true});
    browser.ask("Emulation.setDeviceMetricsOverride", &phone);
    assert_eq!(browser.value("document.documentElement.scrollWidth"), 400);
    let headings = "[...document.querySelectorAll('caption')].filter(c => c.getBoundingClientRect().width > 400).map(c => c.textContent)";
    assert_eq!(browser.value(headings), json!([]), "headings of tables that are cut");
    browser.picture("phone");
    browser.ask("Emulation.clearDeviceMetricsOverride", &json!({}));
}

/// In the medium of printers.
fn fits_paper(browser: &mut Browser) {
    let paper = json!({"width": 720, "height": 1000, "deviceScaleFactor": 1, "mobile": false});
    browser.ask("Emulation.setDeviceMetricsOverride", &paper);
    assert_eq!(browser.value("document.documentElement.scrollWidth"), 720, "nothing stands beside the paper");
    browser.ask("Emulation.clearDeviceMetricsOverride", &json!({}));
}

/// The cost calculator: twice the samples at three times the price are six times the money; a field out of range changes nothing.
fn the_cost_follows_its_numbers(browser: &mut Browser) {
    let cost = "[...document.querySelectorAll('#cost tbody tr')].map(r => [2, 3, 4].map(at => \
                Number(r.children[at].textContent.replaceAll(',', ''))))";
    let enter = |id: &str, value: &str| {
        format!(
            "(() => {{ const i = document.getElementById('{id}'); i.value = '{value}'; i.dispatchEvent(new Event('input', \
             {{bubbles: true}})); }})()"
        )
    };
    let numbers = |value: Value| -> Vec<[f64; 3]> { serde_json::from_value(value).unwrap() };
    let before = numbers(browser.value(cost));
    assert!(before.len() >= 2 && before.iter().flatten().all(|number| *number > 0.0), "{before:?}");
    browser.value(&enter("cost-samples", "2000000"));
    browser.value(&enter("cost-price", "3"));
    let after = numbers(browser.value(cost));
    for (old, new) in before.iter().zip(&after) {
        for (column, times) in [2.0, 2.0, 6.0].into_iter().enumerate() {
            assert!((new[column] / old[column] / times - 1.0).abs() < 0.02, "{old:?} {new:?}");
        }
    }
    browser.value(&enter("cost-price", "-1"));
    assert_eq!(numbers(browser.value(cost)), after);
}

/// By its number, by its bar, and from where its slowness is explained; step 2 is shown again at the end.
fn a_step_is_found(browser: &mut Browser) {
    let type_in = |number: u64| {
        format!(
            "(n => {{ n.value = {number}; n.dispatchEvent(new Event('change')); }})(window['viewer-number'])"
        )
    };
    browser.value(&type_in(7));
    assert_eq!(browser.shown().0, 7);
    let (left, top, width, height) = browser.place("#viewer-strip");
    let at = (left + width * 4.5 / 12.0, top + height - 2.0);
    browser.mouse("mousePressed", at, 1);
    browser.mouse("mouseReleased", at, 0);
    assert_eq!(browser.shown().0, 4);
    let asked = browser.value(
        "(a => { a.click(); return Number(a.dataset.step); })(document.querySelector('#slow a[data-step]'))",
    );
    assert_eq!(json!(browser.shown().0), asked);
    browser.value(&type_in(2));
    assert_eq!(browser.shown().0, 2);
}

#[test]
fn the_page_works_in_a_browser() {
    let Some(mut browser) = Browser::start() else { return };
    let session = with_run(1.2);
    // Every column that a table of idle time may have.
    session.edit("demo/run/metrics.jsonl", |lines| {
        lines.replace("\"bubble_ratio\"", "\"data_wait_ns\":70000000,\"bubble_ratio\"")
    });
    let made = session.dflop(&["report", "demo"]);
    assert!(made.contains("status: 0"), "{made}");
    let url = format!("file://{}", session.path("demo/report.html").canonicalize().unwrap().display());
    browser.scheme("light");
    browser.open(&url);

    // Charts draw: each has a size and marks, and no name of a bar or lane reaches into its axis.
    let charts = browser.value(
        "[...document.querySelectorAll('svg.chart')].filter(s => !s.closest('details:not([open])')).map(s => { const b = \
         s.getBoundingClientRect(); return [b.width > 100, b.height > 20, s.querySelectorAll('rect,path,circle,line,polyline').length > 0]; })",
    );
    assert!(charts.as_array().unwrap().len() >= 6, "{charts}");
    assert!(charts.as_array().unwrap().iter().all(|chart| *chart == json!([true, true, true])), "{charts}");
    let overlaps = browser.value(
        "[...document.querySelectorAll('svg.chart')].flatMap(s => { const lines = [...s.querySelectorAll('.axis \
         line')].map(l => l.getBBox().x); return [...s.querySelectorAll('text.lane')].filter(t => t.getBBox().x + \
         t.getBBox().width > Math.min(...lines)).map(t => t.textContent); })",
    );
    assert_eq!(overlaps, json!([]), "names that reach into their axis");
    fits_a_screen(&mut browser);
    browser.picture("light");
    let light = browser.colours();
    assert!(light.len() >= 4, "the timeline is drawn: {light:?}");

    the_cost_follows_its_numbers(&mut browser);
    // The slider, by keyboard; the reading follows.
    assert_eq!(browser.shown().0, 0);
    browser.value("document.getElementById('viewer-step').focus({preventScroll: true})");
    browser.key("ArrowRight");
    browser.key("ArrowRight");
    assert_eq!(browser.shown().0, 2);
    let reading = browser.value("document.getElementById('viewer-reading').textContent");
    assert!(reading.as_str().unwrap().starts_with("Step 2, aware, measured: "), "{reading}");

    a_step_is_found(&mut browser);

    // Zoom by button, by drag over a part, by key; and back to the whole.
    let (_, from, whole) = browser.shown();
    assert!(from == 0.0 && whole > 0.0);
    browser.value("document.querySelector('[data-do=in]').click()");
    let (_, from, to) = browser.shown();
    assert!(((to - from) / whole - 0.5).abs() < 0.01, "{from} {to} {whole}");
    browser.value("document.querySelector('[data-do=all]').click()");
    // A point of the first lane, at a part of the time that is shown.
    let point = |place: (f64, f64, f64, f64)| {
        let (left, top, width, _) = place;
        move |share: f64| (left + 118.0 + share * (width - 126.0), top + 30.0)
    };
    let at = point(browser.place("#viewer-canvas"));
    browser.mouse("mouseMoved", at(0.25), 0);
    browser.mouse("mousePressed", at(0.25), 1);
    browser.mouse("mouseMoved", at(0.75), 1);
    browser.mouse("mouseReleased", at(0.75), 0);
    let (_, from, to) = browser.shown();
    assert!((from / whole - 0.25).abs() < 0.02 && (to / whole - 0.75).abs() < 0.02, "{from} {to} {whole}");
    browser.value("document.getElementById('viewer-canvas').focus({preventScroll: true})");
    browser.key("PageDown");
    assert_eq!(browser.shown().0, 3, "the part stays while steps change");
    browser.key("ArrowRight");
    assert!(browser.shown().1 > from);
    browser.key("0");
    browser.key("PageUp");
    let (step, from, to) = browser.shown();
    assert!(step == 2 && from == 0.0 && (to / whole - 1.0).abs() < 1e-6);

    // Hover: some block of the first lane tells what it is.
    let mut told = Vec::new();
    // Keys may have scrolled the page.
    let at = point(browser.place("#viewer-canvas"));
    for part in 0..20 {
        browser.mouse("mouseMoved", at(f64::from(part) / 20.0 + 0.01), 0);
        let tip = browser.value(
            "(() => { const t = document.querySelector('.tip'); return t.hidden ? '' : t.textContent; })()",
        );
        told.push(tip.as_str().unwrap().to_owned());
    }
    assert!(
        told.iter().any(|tip| tip.contains("rank 0 encoder: 0F") && tip.contains("forward of microbatch")),
        "{told:?}"
    );
    assert!(told.iter().any(|tip| tip.contains("waits")), "{told:?}");

    // Dark has other colours, paper has no controls.
    browser.scheme("dark");
    let dark = browser.colours();
    assert!(dark.len() >= 4 && dark != light, "{dark:?}");
    browser.picture("dark");
    fits_a_phone(&mut browser);
    browser.ask("Emulation.setEmulatedMedia", &json!({"media": "print"}));
    assert_eq!(browser.value("getComputedStyle(document.querySelector('.controls')).display"), "none");
    fits_paper(&mut browser);
    browser.ask("Emulation.setEmulatedMedia", &json!({"media": ""}));

    assert_eq!(browser.problems, Vec::<String>::new());
    assert_eq!(browser.requests, std::slice::from_ref(&url), "a request leaves the page");

    // Without scripts: no dead control, and all numbers in tables.
    browser.ask("Emulation.setScriptExecutionDisabled", &json!({"value": true}));
    browser.open(&url);
    let found = browser.value(
        "[document.getElementById('viewer').hidden, [...document.querySelectorAll('#steps tbody tr')].length, \
         document.querySelector('#steps noscript') !== null]",
    );
    assert_eq!(found, json!([true, 12, true]));
    browser.picture("plain");
}

/// Both runs of a step are on one canvas: the slider, the window and the pointer serve both.
#[test]
fn two_runs_are_drawn_one_above_the_other() {
    let Some(mut browser) = Browser::start() else { return };
    let session = with_run(1.5);
    train(&session, "demo/quick", ["plan.json", "model_profile.json"], 0..9, 1.0);
    let made = session.dflop(&["report", "demo", "--against", "demo/quick"]);
    assert!(made.contains("status: 0"), "{made}");
    let url = format!("file://{}", session.path("demo/report.html").canonicalize().unwrap().display());
    browser.scheme("light");
    browser.open(&url);
    let reading = "document.getElementById('viewer-reading').textContent";
    let told = browser.value(reading);
    assert!(told.as_str().unwrap().starts_with("Step 0, aware, measured: "), "it was left out: {told}");
    let height = |browser: &mut Browser| browser.place("#viewer-canvas").3;
    let alone = height(&mut browser);
    browser.value("document.querySelector('[data-do=after]').click()");
    let told = browser.value(reading);
    let told = told.as_str().unwrap();
    assert!(
        told.starts_with("Step 1, run, aware, measured: ") && told.contains(". Below it quick, aware"),
        "{told}"
    );
    assert!(height(&mut browser) > 1.7 * alone, "the other run has lanes of its own");
    let (left, top, width, tall) = browser.place("#viewer-canvas");
    // The last lane is of the other run, which has ended where this one goes on.
    let mut tips = Vec::new();
    for share in [0.4, 0.5, 0.6, 0.97] {
        browser.mouse("mouseMoved", (left + 118.0 + share * (width - 126.0), top + tall - 12.0), 0);
        let tip = browser.value(
            "(() => { const t = document.querySelector('.tip'); return t.hidden ? '' : t.textContent; })()",
        );
        tips.push(tip.as_str().unwrap().to_owned());
    }
    assert!(tips[..3].iter().all(|tip| tip.starts_with("quick, rank ")) && tips[3].is_empty(), "{tips:?}");
    browser.picture("against-light");
    browser.scheme("dark");
    browser.picture("against-dark");
    let narrow = json!({"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": true});
    browser.ask("Emulation.setDeviceMetricsOverride", &narrow);
    let wide = browser.value(
        "[...document.querySelectorAll('body *')].filter(e => !e.parentElement.closest('.scroll') && e.getBoundingClientRect().right > 421).map(e => \
         (e.closest('section') || {}).id + ': ' + e.tagName).slice(0, 5)",
    );
    assert_eq!(wide, json!([]), "what a narrow window cuts off");
    browser.picture("against-narrow");
    browser.ask("Emulation.clearDeviceMetricsOverride", &json!({}));
    browser.ask("Emulation.setEmulatedMedia", &json!({"media": "print"}));
    browser.picture("against-print");
    assert_eq!(browser.problems, Vec::<String>::new());
    assert_eq!(browser.requests, [url]);
}

/// The served page shows the newest step, and a step that has come since.
#[test]
fn a_watched_page_follows_its_run_in_a_browser() {
    let Some(mut browser) = Browser::start() else { return };
    let session = with_run(1.0);
    let trace = session.path("demo/run/trace.jsonl");
    let whole = fs::read_to_string(&trace).unwrap();
    let lines: Vec<&str> = whole.split_inclusive('\n').collect();
    fs::write(&trace, lines[..10].concat()).unwrap();
    let server = Server::of(&session);
    let url = format!("http://{}/", server.address);
    browser.open(&url);
    assert_eq!(browser.shown().0, 9);
    fs::write(&trace, &whole).unwrap();
    let (shown, begun) = ("document.getElementById('viewer')?.dataset.step", Instant::now());
    while browser.value_between_loads(shown) != Some("11".into()) {
        assert!(begun.elapsed() < PATIENCE, "the page does not follow");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(browser.problems, Vec::<String>::new());
    assert!(browser.requests.iter().all(|request| request.starts_with(&url)), "{:?}", browser.requests);
}
