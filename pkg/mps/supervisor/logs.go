package supervisor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// outputFile receives the standard output of the control daemon. With option -f, that is the log
	// of the daemon and of its servers.
	outputFile = "control.log"
	// maxLog is the size in bytes from which the supervisor truncates a log file that it has read.
	maxLog = 4 << 20
	// maxLine (bytes of a line) and maxLines (lines) limit what the supervisor copies to its own log
	// each time it reads a log file. Without them, clients could fill that log through their daemon.
	maxLine  = 1 << 10
	maxLines = 20
	// logInterval is how often the supervisor reads the logs.
	logInterval = time.Second
	// maxTail is how many bytes at the end of a daemon's log lastLines searches for the reason of a
	// failure. maxReasonLines is how many lines an error quotes.
	maxTail        = 4 << 10
	maxReasonLines = 5
)

// routineLine matches the lines that the control daemon logs about each command that it receives.
// The supervisor leaves them out, because it sends several commands a minute.
var routineLine = regexp.MustCompile(`(Accepting connection\.\.\.|NEW UI|UI closed|Cmd:get_\S+( \d+)?|` +
	`Control +\d+\] (\d+(\.\d+|[MG])|No default pinned memory limit set for the device!)?)$`)

// openOutput opens the file for a control daemon's output. The file is open for appending, so that
// the supervisor can truncate it while the daemon writes.
func openOutput(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, outputFile), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the log of the control daemon: %w", err)
	}
	return f, nil
}

// lastLines returns the last lines that the daemon wrote to the file f after the offset since,
// without lines that match routineLine.
func lastLines(f *os.File, since int64) string {
	info, err := f.Stat()
	if err != nil {
		return ""
	}
	from := max(since, info.Size()-maxTail)
	text := make([]byte, maxTail)
	n, _ := f.ReadAt(text, from)
	var reasons []string
	for line := range strings.Lines(string(text[:n])) {
		if line = strings.TrimSpace(line); line != "" && !routineLine.MatchString(line) {
			reasons = append(reasons, line)
		}
	}
	if len(reasons) == 0 {
		return ""
	}
	return ": " + strings.Join(reasons[max(0, len(reasons)-maxReasonLines):], "; ")
}

// follower passes each new line of one daemon's log files to its function lines, and truncates log
// files that are too long.
type follower struct {
	dir   string
	read  map[string]int64
	lines func(file, line string)
}

// newFollower returns a follower that starts at the end of the existing logs, because an earlier
// supervisor forwarded what is there.
func newFollower(dir string, lines func(file, line string)) *follower {
	f := &follower{dir: dir, read: map[string]int64{}, lines: lines}
	for _, path := range f.files() {
		if info, err := os.Lstat(path); err == nil {
			f.read[path] = info.Size()
		}
	}
	return f
}

// follow reads the daemon's logs every logInterval and passes on the new lines, until the context
// ends. Then it passes on the remaining lines and returns.
func (f *follower) follow(ctx context.Context) {
	ticker := time.NewTicker(logInterval)
	defer ticker.Stop()
	for ctx.Err() == nil {
		f.poll()
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
	f.poll()
}

func (f *follower) files() []string {
	paths, _ := filepath.Glob(filepath.Join(f.dir, "*.log")) // The only error is an invalid pattern.
	return paths
}

func (f *follower) poll() {
	for _, path := range f.files() {
		f.forward(filepath.Base(path), f.readNew(path))
		if f.read[path] >= maxLog && os.Truncate(path, 0) == nil {
			f.read[path] = 0
		}
	}
}

// readNew returns the complete lines that were added to a log file since the last call. It splits a
// line that is longer than maxLine.
func (f *follower) readNew(path string) []byte {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return nil
	}
	if info.Size() < f.read[path] {
		f.read[path] = 0 // The file was truncated.
	}
	data, err := io.ReadAll(io.NewSectionReader(file, f.read[path], maxLog))
	if err != nil {
		return nil
	}
	whole := bytes.LastIndexByte(data, '\n') + 1
	if whole == 0 && len(data) >= maxLine {
		whole = len(data)
	}
	f.read[path] += int64(whole)
	return data[:whole]
}

// forward passes on the first maxLines lines that are not routine.
func (f *follower) forward(name string, data []byte) {
	count := 0
	for line := range bytes.Lines(data) {
		line = bytes.TrimSpace(line)
		if len(line) == 0 || routineLine.Match(line) {
			continue
		}
		if count++; count <= maxLines {
			f.lines(name, string(line[:min(len(line), maxLine)]))
		}
	}
	if count > maxLines {
		f.lines(name, fmt.Sprintf("(%d more lines, see the log file)", count-maxLines))
	}
}

// withLastLines returns err with the last log lines of process p. multi says whether the daemon was
// started with the multi-user option. If the log shows that the driver is too old for that option,
// the error says this instead.
func withLastLines(err error, p *process, output *os.File, since int64, multi bool) error {
	words := lastLines(output, since)
	if !errors.Is(err, errEnded) {
		return fmt.Errorf("%w%s", err, words)
	}
	if multi && strings.Contains(words, noDaemon) {
		return fmt.Errorf("this node's NVIDIA driver has no MPS for several users (%s does not support %s): "+
			"upgrade the driver to 555 or later; strategy MPS works without multiUser, fractions do not", controlProgram, multiUser)
	}
	return fmt.Errorf("%w (%s)%s", err, p.how, words)
}
