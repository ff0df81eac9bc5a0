package watch

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/exclusion"
)

// oneProcessor limits the Go runtime of a child process, so that it does not wake a thread for each
// small task. Long NVML calls get their own threads anyway.
const oneProcessor = "GOMAXPROCS=1"

// watchChild is a child process of [Run].
type watchChild struct {
	process  *os.Process
	stdin    io.WriteCloser
	signals  chan device.Signal
	stop     chan struct{} // closed when the parent reads no more signals
	ended    chan struct{} // closed after its last message
	gone     chan struct{} // closed when the process has ended
	err      error         // read it after ended is closed
	stderr   *child.Tail
	coverage *exclusion.Coverage
	replaced bool // another process took over, or this one failed to take over
}

func (c *watchChild) hasEnded() bool {
	select {
	case <-c.gone:
		return true
	default:
		return false
	}
}

func startWatchChild(argv []string, order watchOrder, hidden []string) (*watchChild, error) {
	command := exec.Command(argv[0], argv[1:]...)
	command.Env = append(os.Environ(), oneProcessor)
	stdin, err := command.StdinPipe() // the end of this pipe tells the child that the parent is gone
	if err != nil {
		return nil, err
	}
	stdout, err := command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c := &watchChild{
		stdin: stdin, signals: make(chan device.Signal), stop: make(chan struct{}), ended: make(chan struct{}), gone: make(chan struct{}),
		stderr: &child.Tail{Limit: 2048},
	}
	command.Stderr = c.stderr
	command.WaitDelay = time.Second
	if err := startHiding(command, hidden); err != nil {
		return nil, err
	}
	c.process = command.Process
	go func() {
		defer close(c.gone)
		c.err = json.NewEncoder(stdin).Encode(order)
		if c.err == nil {
			c.err = c.readSignals(stdout)
		}
		close(c.ended)
		_ = command.Process.Kill() // the process is useless after its output has ended
		_ = command.Wait()
	}()
	return c, nil
}

// readSignals passes the child's signals to c.signals until the child closes its output.
func (c *watchChild) readSignals(stdout io.Reader) error {
	decoder := json.NewDecoder(stdout)
	for {
		var s device.Signal
		if err := decoder.Decode(&s); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("read a signal: %w", err)
		}
		select {
		case c.signals <- s:
		case <-c.stop:
			return nil
		}
	}
}

// kill kills the child process and stops reading from it. A process that hangs in the driver ends
// only when the driver returns.
func (c *watchChild) kill() {
	close(c.stop)
	_ = c.stdin.Close()
	_ = c.process.Kill()
}

// failure returns the error of a child process that ended without being killed.
func (c *watchChild) failure() error {
	if c.err != nil {
		return fmt.Errorf("the watcher process has ended (%w)%s", c.err, c.stderr)
	}
	return fmt.Errorf("the watcher process has ended%s", c.stderr)
}
