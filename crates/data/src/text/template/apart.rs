//! Chat templates in a process of their own.
//!
//! A template is a program that somebody else wrote, and the engine that runs it is made for trusted templates. A list that
//! holds itself overflows the stack, and a text that is doubled forty times takes all memory; both end the process. So the
//! command line and the Python module name a command ([`render_templates_with`]) that renders in a child process
//! ([`serve_templates`]). If a template ends the child, for example at its memory limit, the parent gives an error.
//!
//! ```text
//! this process                               a child, one for each thread that renders at the same time
//!   Open   {id, source, special tokens}  ->    compiles the template          ->  nothing, or what is wrong
//!   Expand {id, messages, tools, prompt} ->    renders it                     ->  the text, or what is wrong
//! ```
//!
//! A request and its answer are a line of JSON each. Without such a command templates run in this process: a library
//! that is used from Rust has no program to start.

use super::engine::{Engine, Message, Refusal};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Memory that a child may map, in KiB: 1 GiB. A rendering takes some MiB; Python itself maps a few hundred.
const MEMORY_KIB: u64 = 1 << 20;
/// The longest that one rendering may take. Instructions are counted, but one instruction may copy a text of any length.
const PATIENCE: Duration = Duration::from_secs(30);
/// The longest text that a template may write, in bytes.
const TEXT_BYTES_MAX: usize = 64 << 20;
/// Children that wait for work, at most.
const IDLE_MAX: usize = 64;
/// Templates that one child holds, at most: then it is replaced.
const TEMPLATES_MAX: usize = 64;

/// The command that answers by [`serve_templates`].
static COMMAND: OnceLock<Vec<OsString>> = OnceLock::new();
/// Children that wait for work.
static POOL: Mutex<Pool> = Mutex::new(Pool { process: 0, idle: Vec::new() });
/// Templates opened so far.
static NUM_TEMPLATES: AtomicU64 = AtomicU64::new(0);

/// Renders chat templates in processes of their own from now on: in those that `command` starts, which must call
/// [`serve_templates`] with its standard input and output. Only the first call counts.
pub fn render_templates_with(command: Vec<OsString>) {
    // A second caller in one process says the same.
    let _ = COMMAND.set(command);
}

/// What a child is asked.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Request {
    Open { id: u64, source: String, special_tokens: Vec<(String, String)> },
    Expand { id: u64, messages: Vec<Message>, tools: Vec<Value>, add_generation_prompt: bool },
}

/// What it answers: the text, empty for a template that is opened, or what is wrong.
type Answer = Result<String, Refusal>;

/// Answers requests line by line until `input` ends: the work of the command of [`render_templates_with`].
///
/// # Errors
/// Those of the two streams; a line that is no request is [`io::ErrorKind::InvalidData`].
pub fn serve_templates(input: impl BufRead, mut output: impl Write) -> io::Result<()> {
    let mut engines: BTreeMap<u64, Engine> = BTreeMap::new();
    for line in input.lines() {
        let answer: Answer = match serde_json::from_str(&line?)? {
            Request::Open { id, source, special_tokens } => {
                Engine::new(source, &special_tokens).map(|engine| {
                    engines.insert(id, engine);
                    String::new()
                })
            }
            Request::Expand { id, messages, tools, add_generation_prompt } => match engines.get(&id) {
                Some(engine) => engine.expand(&messages, &tools, add_generation_prompt).and_then(short),
                None => Err(Refusal::Said("the chat template was not opened".to_owned())),
            },
        };
        serde_json::to_writer(&mut output, &answer)?;
        output.write_all(b"\n")?;
        output.flush()?;
    }
    Ok(())
}

/// The text, if it is not too long to be one.
fn short(text: String) -> Answer {
    if text.len() <= TEXT_BYTES_MAX {
        return Ok(text);
    }
    let len = text.len();
    Err(Refusal::Said(format!("the chat template: it writes {len} bytes, must be at most {TEXT_BYTES_MAX}")))
}

/// A template that children render.
#[derive(Debug)]
pub(super) struct Remote {
    id: u64,
    source: String,
    special_tokens: Vec<(String, String)>,
}

impl Remote {
    /// The template, compiled by a child; `None` where no command was named.
    pub(super) fn new(source: &str, special_tokens: &[(String, String)]) -> Option<Result<Self, Refusal>> {
        COMMAND.get()?;
        let remote = Self {
            id: NUM_TEMPLATES.fetch_add(1, Ordering::Relaxed),
            source: source.to_owned(),
            special_tokens: special_tokens.to_vec(),
        };
        Some(remote.ask(None).map(|_| remote))
    }

    /// What the template writes of the messages, where these tools may be called.
    pub(super) fn expand(
        &self,
        messages: &[Message],
        tools: &[Value],
        add_generation_prompt: bool,
    ) -> Answer {
        let (messages, tools) = (messages.to_vec(), tools.to_vec());
        self.ask(Some(&Request::Expand { id: self.id, messages, tools, add_generation_prompt }))
    }

    /// The answer of a child to the request, after it has opened the template.
    fn ask(&self, request: Option<&Request>) -> Answer {
        let mut worker = match Worker::idle() {
            Some(worker) => worker,
            None => Worker::start().map_err(|error| {
                Refusal::Ended(format!("cannot start the process that renders chat templates: {error}"))
            })?,
        };
        let mut answer = Ok(String::new());
        if !worker.opened.contains(&self.id) {
            let (id, source) = (self.id, self.source.clone());
            let open = Request::Open { id, source, special_tokens: self.special_tokens.clone() };
            answer = worker.ask(&open).map_err(|end| end.refusal())?;
            worker.opened.insert(self.id);
        }
        if let (Ok(_), Some(request)) = (&answer, request) {
            answer = worker.ask(request).map_err(|end| end.refusal())?;
        }
        worker.rest();
        answer
    }
}

/// Children of this process that wait for work.
struct Pool {
    /// The process that they belong to: one that was forked must not talk to the children of its parent.
    process: u32,
    idle: Vec<Worker>,
}

impl Pool {
    /// The pool of this process.
    fn with<T>(act: impl FnOnce(&mut Self) -> T) -> T {
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        let process = std::process::id();
        if pool.process != process {
            // Those of the parent go on working for it: they are not to be stopped or waited for here.
            std::mem::take(&mut pool.idle).into_iter().for_each(std::mem::forget);
            pool.process = process;
        }
        act(&mut pool)
    }
}

/// A child, and the thread that reads its answers.
struct Worker {
    child: Child,
    /// `None` once it is to end.
    requests: Option<ChildStdin>,
    answers: Receiver<String>,
    /// The templates that it has opened.
    opened: BTreeSet<u64>,
}

impl Worker {
    /// A child that waits for work, if there is one.
    fn idle() -> Option<Self> {
        Pool::with(|pool| pool.idle.pop())
    }

    fn start() -> io::Result<Self> {
        let command = COMMAND.get().ok_or_else(|| io::Error::other("no command is named"))?;
        // No core dumps: a template that ends its process is no news to who debugs this one. Systems without a limit on
        // memory go without.
        // It ends with its input: a queue that signals all processes of a job must not make a sample bad.
        let limited =
            format!("trap '' HUP INT TERM USR1 USR2; ulimit -c 0; ulimit -v {MEMORY_KIB}; exec \"$@\"");
        let mut child = Command::new("sh")
            .args(["-c", &limited, "sh"])
            .args(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // Ctrl-C is for this process: children end when their input does.
            .process_group(0)
            .spawn()?;
        let requests = child.stdin.take();
        let output = child.stdout.take().ok_or_else(|| io::Error::other("it has no output"))?;
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let Ok(line) = line else { break };
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { child, requests, answers, opened: BTreeSet::new() })
    }

    fn ask(&mut self, request: &Request) -> Result<Answer, End> {
        let mut line = serde_json::to_vec(request).map_err(|error| End::Other(error.to_string()))?;
        line.push(b'\n');
        let written = self.requests.as_mut().map(|requests| requests.write_all(&line));
        if !matches!(written, Some(Ok(()))) {
            return Err(self.end());
        }
        match self.answers.recv_timeout(PATIENCE) {
            Ok(line) => serde_json::from_str(&line).map_err(|error| End::Other(error.to_string())),
            Err(RecvTimeoutError::Timeout) => Err(End::Slow),
            Err(RecvTimeoutError::Disconnected) => Err(self.end()),
        }
    }

    /// How the child ended, which has closed its output.
    fn end(&mut self) -> End {
        match self.child.wait() {
            Ok(status) => status.signal().map_or_else(|| End::Other(status.to_string()), End::Signal),
            Err(error) => End::Other(error.to_string()),
        }
    }

    /// Waits for further work, or ends where enough others do.
    fn rest(self) {
        let too_many = Pool::with(|pool| {
            if pool.idle.len() < IDLE_MAX && self.opened.len() < TEMPLATES_MAX {
                pool.idle.push(self);
                return None;
            }
            Some(self)
        });
        drop(too_many);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.requests.take());
        // It has nothing to lose. That it may have ended already is no error.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How a child ended instead of answering.
enum End {
    Signal(i32),
    Slow,
    Other(String),
}

impl End {
    fn refusal(&self) -> Refusal {
        let how = match self {
            Self::Signal(signal) => format!(
                "it ended the process that renders it (signal {signal}): what it makes is nested too deeply, or takes \
                 more than {} MiB",
                MEMORY_KIB >> 10
            ),
            Self::Slow => format!("it takes more than {} s", PATIENCE.as_secs()),
            Self::Other(cause) => format!("the process that renders it gave up: {cause}"),
        };
        Refusal::Ended(format!("the chat template: {how}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(requests: &str) -> Vec<Answer> {
        let mut output = Vec::new();
        serve_templates(requests.as_bytes(), &mut output).unwrap();
        output
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(|line| serde_json::from_slice(line).unwrap())
            .collect()
    }

    #[test]
    fn requests_are_answered_line_by_line() {
        let open = |id: u64, source: &str| serde_json::json!({"Open": {"id": id, "source": source, "special_tokens": [["bos_token", "<s>"]]}});
        let expand = |id: u64| {
            let messages = [
                serde_json::json!({"role": "user", "content": "a\nb"}),
                serde_json::json!({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "c"}]}),
            ];
            serde_json::json!({"Expand": {"id": id, "messages": messages, "tools": [], "add_generation_prompt": true}})
        };
        let source = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}\
            {% else %}{% for part in m.content %}[{{ part.type }} {{ part.text }}]{% endfor %}{% endif %};{% endfor %}\
            {{ add_generation_prompt }}";
        let lines = [open(3, source), open(4, "{% for %}"), expand(3), expand(4)];
        let lines = lines.map(|line| format!("{line}\n")).concat();
        let [opened, broken, text, unknown] = said(&lines).try_into().unwrap();
        assert_eq!(opened, Ok(String::new()));
        assert!(broken.unwrap_err().words().starts_with("the chat template does not parse: line 1"));
        assert_eq!(text.unwrap(), "<s>user:a\nb;user:[image ][text c];True");
        assert!(unknown.is_err());
        assert!(serve_templates("no request\n".as_bytes(), io::sink()).is_err());
    }

    #[test]
    fn a_text_that_is_too_long_is_refused() {
        assert_eq!(short("a".to_owned()), Ok("a".to_owned()));
        let error = short("a".repeat(TEXT_BYTES_MAX + 1)).unwrap_err();
        assert_eq!(error.words(), "the chat template: it writes 67108865 bytes, must be at most 67108864");
    }
}
