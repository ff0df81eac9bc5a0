package child

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/tail"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/onecard"
)

const (
	// MaxStuck is how many child processes may hang in the driver at once. Then no more are
	// started, because a process in uninterruptible sleep cannot be killed, and each further one
	// could hang too.
	MaxStuck = 4
	// KillLimit is how long to wait until a killed child process ends. It ends within milliseconds
	// unless it hangs in the driver.
	KillLimit = 2 * time.Second
	// exitLimit is how long [Process.Failure] waits for the exit status of a process that sends no
	// more messages. It is also how long a grandchild may keep standard error open.
	exitLimit = time.Second
	// keptStderr is how many bytes of standard error are kept: the last ones.
	keptStderr = 2048
)

// Command says how to start a child process.
type Command struct {
	Args []string
	// Env are variables in addition to those of this process.
	Env []string
	// Hidden are device nodes that the process should not open. If hiding them fails, it can open
	// them, but it is not asked about their cards.
	Hidden []string
}

// Process is a child process that sends messages of type M.
type Process[M any] struct {
	PID int
	// Messages has what the process sends, in order. It waits until each message is taken.
	Messages <-chan M
	// Killed is closed when [Process.Kill] was called.
	Killed <-chan struct{}
	// Ended is closed after the last message. The process may still hang in the driver.
	Ended <-chan struct{}
	// Gone is closed when the process has ended, so that all its files are closed.
	Gone <-chan struct{}

	stdin  io.WriteCloser
	stderr *tail.Writer
	kill   func()
	said   error // why the output ended, nil at its end. Read it after Ended is closed.
	exit   error // the exit status. Read it after Gone is closed.
}

// Start starts a child process and sends it an order.
func Start[M any](c Command, order any) (*Process[M], error) {
	command := exec.Command(c.Args[0], c.Args[1:]...)
	command.Env = append(append(os.Environ(), nvidia.ChildMark), c.Env...)
	stdin, err := command.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	messages, killed, ended, gone := make(chan M), make(chan struct{}), make(chan struct{}), make(chan struct{})
	p := &Process[M]{
		Messages: messages, Killed: killed, Ended: ended, Gone: gone, stdin: stdin, stderr: &tail.Writer{Limit: keptStderr},
	}
	command.Stderr = p.stderr
	command.WaitDelay = exitLimit
	if onecard.Hide(c.Hidden, func() { err = command.Start() }); err != nil {
		return nil, err
	}
	p.PID = command.Process.Pid
	p.kill = sync.OnceFunc(func() {
		close(killed)
		_ = stdin.Close()
		_ = stdout.Close() // ends the reading, even if a grandchild has the pipe open
		_ = command.Process.Kill()
	})
	go func() {
		defer close(gone)
		p.said = receive(stdout, messages, killed)
		close(ended)
		p.kill() // it is useless without output
		p.exit = command.Wait()
	}()
	_ = p.Send(order) // if it fails, the process is dead, and Failure says why
	return p, nil
}

// receive passes messages on until the output ends, is invalid, or killed is closed.
func receive[M any](output io.Reader, messages chan<- M, killed <-chan struct{}) error {
	decoder := json.NewDecoder(output)
	for {
		var m M
		if err := decoder.Decode(&m); errors.Is(err, io.EOF) || isClosed(killed) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read its answer: %w", err)
		}
		select {
		case messages <- m:
		case <-killed:
			return nil
		}
	}
}

// Send sends one more message to the process.
func (p *Process[M]) Send(message any) error { return json.NewEncoder(p.stdin).Encode(message) }

// Dismiss tells the process to send its last messages and to end.
func (p *Process[M]) Dismiss() { _ = p.stdin.Close() }

// Kill kills the process and stops reading from it. A process that hangs in the driver ends only
// when the driver returns.
func (p *Process[M]) Kill() { p.kill() }

// IsGone reports whether the process has ended.
func (p *Process[M]) IsGone() bool { return isClosed(p.Gone) }

// IsUsable reports whether the process may take another message: it was not killed and its output
// has not ended.
func (p *Process[M]) IsUsable() bool { return !isClosed(p.Killed) && !isClosed(p.Ended) }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Failure returns why a process that was not killed sends no more messages: an invalid message, or
// its exit status. It must be called after Ended is closed. It waits a moment for the exit status.
func (p *Process[M]) Failure() error {
	var exit error
	select {
	case <-p.Gone:
		exit = p.exit
	case <-time.After(exitLimit):
		exit = errors.New("its output has ended, but it has not")
	}
	switch {
	case p.said != nil:
		return errors.Join(p.said, exit)
	case exit != nil:
		return exit
	default:
		return errors.New("exit status 0")
	}
}

// Stderr returns the end of what the process wrote to standard error, after a colon. It is empty if
// the process wrote nothing.
func (p *Process[M]) Stderr() string { return p.stderr.String() }

// Hanging returns the error of a process that was killed but is not gone. cause says what it should
// have done.
func (p *Process[M]) Hanging(cause error) *nvidia.HangingError {
	return &nvidia.HangingError{PID: p.PID, Gone: p.Gone, Err: cause}
}
