package cut

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
)

// worker is a child process with NVML open.
type worker struct {
	process *os.Process
	stdin   io.WriteCloser
	answers chan answer
	gone    chan struct{} // closed when the process has ended
	failure error         // why the process ended, to be read after gone is closed
	stderr  *child.Tail
	ended   bool
	lastUse time.Time
}

func startWorker(p nvidia.Paths, argv []string) (*worker, error) {
	command := exec.Command(argv[0], argv[1:]...)
	stdin, err := command.StdinPipe() // the end of this pipe tells the child that the parent is gone
	if err != nil {
		return nil, err
	}
	stdout, err := command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	w := &worker{stdin: stdin, answers: make(chan answer, 1), gone: make(chan struct{}), stderr: &child.Tail{Limit: 2048}}
	command.Stderr = w.stderr
	command.WaitDelay = time.Second
	if err := command.Start(); err != nil {
		return nil, err
	}
	w.process = command.Process
	go func() {
		defer close(w.gone)
		err := w.readAnswers(stdout)
		_ = command.Process.Kill() // the worker is useless after its output has ended or was invalid
		w.failure = errors.Join(err, command.Wait())
	}()
	// If the send fails, the worker is dead, and the first request reports that.
	_ = w.send(p)
	return w, nil
}

// readAnswers reads the worker's answers until its output ends.
func (w *worker) readAnswers(stdout io.Reader) error {
	decoder := json.NewDecoder(stdout)
	for {
		var a answer
		if err := decoder.Decode(&a); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("read its answer: %w", err)
		}
		select {
		case w.answers <- a:
		default:
			return errors.New("unexpected answer without a request")
		}
	}
}

func (w *worker) send(v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.stdin.Write(append(line, '\n'))
	return err
}

// usable reports whether the worker can take another request, because it was not killed and its
// process still runs.
func (w *worker) usable() bool {
	select {
	case <-w.gone:
		return false
	default:
		return !w.ended
	}
}

func (w *worker) call(ctx context.Context, r request) (answer, *Error) {
	defer func() { w.lastUse = time.Now() }()
	r.Patience = retryFor(ctx)
	_ = w.send(r) // if it fails, the worker is gone
	select {
	case a := <-w.answers:
		return a, nil
	case <-ctx.Done():
		w.kill()
		return answer{}, timeoutError(r, context.Cause(ctx), "the driver has not answered in time; the result is unknown")
	case <-w.gone:
	}
	select {
	case a := <-w.answers: // its last answer
		return a, nil
	default:
		return answer{}, r.fail(device.FailureDied, "the process that talks to the driver died (%v)%s", w.failure, w.stderr)
	}
}

// kill kills the worker. A worker that hangs in the driver ends only when the driver returns.
func (w *worker) kill() {
	w.ended = true
	_ = w.stdin.Close()
	_ = w.process.Kill()
}
