package supervisor

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/namespace"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
)

const (
	// answerTimeout is how long the control daemon may take to answer one command. It needs no GPU for
	// an answer, so it answers at once.
	answerTimeout = 5 * time.Second
	// maxAnswer limits the control daemon's answer to one command, in bytes.
	maxAnswer = 64 << 10
	// multiUser is the control daemon's option for clients of several Linux users. Driver 555 and
	// later know it. An older driver, such as 550, ignores the option and looks for a running daemon
	// instead.
	multiUser = "-multiuser-server"
	noDaemon  = "Cannot find MPS control daemon process"
)

// control sends commands to one MPS control daemon. For each command, it runs NVIDIA's client
// program in a mount namespace that shows the daemon's pipes.
type control struct {
	program string
	view    namespace.View
	env     []string
}

// newControl returns the control of a daemon. It looks for the driver's programs at each call,
// because the driver may be installed or replaced at any time.
func newControl(o Options, spec mps.Daemon) (control, error) {
	paths := o.Paths
	program, controlErr := driverroot.Find(o.DriverRootMount, controlProgram)
	server, serverErr := driverroot.Find(o.DriverRootMount, serverProgram)
	if err := cmp.Or(controlErr, serverErr); err != nil {
		return control{}, fmt.Errorf("find the driver's MPS on this node (driver root %s): %w", o.DriverRoot, err)
	}
	return control{
		program: o.Program,
		view: namespace.View{
			Pipes: paths.Pipes(spec.ID), Logs: paths.Logs(spec.ID), Shm: paths.Shm(spec.ID),
			DriverRoot: o.DriverRootMount, LibraryDir: program.LibraryDir, Programs: []string{program.Path, server.Path}, Dev: o.dev(),
		},
		// Inherit no variables, because CUDA would read those of the supervisor's Pod.
		env: append([]string{
			"CUDA_VISIBLE_DEVICES=" + strings.Join(spec.Devices, ","),
			"CUDA_MPS_PIPE_DIRECTORY=" + namespace.Pipes,
			"CUDA_MPS_LOG_DIRECTORY=" + namespace.Logs,
		}, namespace.Environment()...),
	}, nil
}

// daemonArgs returns the arguments that run the control daemon in the foreground. There it logs to
// standard output.
func daemonArgs(spec mps.Daemon) []string {
	if spec.MultiUser {
		return []string{"-f", multiUser}
	}
	return []string{"-f"}
}

// ask sends one command to the daemon and returns its answer.
func (c control) ask(ctx context.Context, command string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, answerTimeout, fmt.Errorf("no answer from the control daemon after %s", answerTimeout))
	defer cancel()
	client := exec.CommandContext(ctx, c.program, "daemon", c.view.String())
	client.Env, client.Dir = c.env, "/"
	client.Stdin = strings.NewReader(command + "\n")
	var answer truncatedBuffer
	client.Stdout, client.Stderr = &answer, &answer
	client.WaitDelay = time.Second
	err := client.Run()
	text := strings.TrimSpace(answer.String())
	switch {
	case ctx.Err() != nil:
		return "", fmt.Errorf("send %q to the control daemon: %w", command, context.Cause(ctx))
	case err != nil:
		return "", fmt.Errorf("send %q to the control daemon: %w: %.500s", command, err, text)
	}
	return text, nil
}

// truncatedBuffer keeps the first maxAnswer bytes that are written to it.
type truncatedBuffer struct{ bytes.Buffer }

func (l *truncatedBuffer) Write(p []byte) (int, error) {
	_, _ = l.Buffer.Write(p[:min(len(p), max(0, maxAnswer-l.Len()))])
	return len(p), nil
}

// setting is one default value of the control daemon, such as a memory limit. The command set
// writes the value, and the command get reads it. matches reports whether an answer to get is the
// wanted value.
type setting struct {
	set, get string
	matches  func(answer string) bool
}

// settings returns a setting for each default value of the control daemon that spec asks for.
func settings(spec mps.Daemon) []setting {
	var all []setting
	if p := spec.ThreadPercentage; p != nil {
		all = append(all, setting{
			set: fmt.Sprintf("set_default_active_thread_percentage %d", *p),
			get: "get_default_active_thread_percentage",
			matches: func(answer string) bool {
				have, err := strconv.ParseFloat(answer, 64)
				return err == nil && have == float64(*p)
			},
		})
	}
	for _, ordinal := range slices.Sorted(maps.Keys(spec.MemoryLimits)) {
		limit := spec.MemoryLimits[ordinal]
		all = append(all, setting{
			set:     fmt.Sprintf("set_default_device_pinned_mem_limit %d %dM", ordinal, limit),
			get:     fmt.Sprintf("get_default_device_pinned_mem_limit %d", ordinal),
			matches: func(answer string) bool { return limitMatches(answer, limit) },
		})
	}
	return all
}

// limitMatches reports whether the daemon's answer to a get command has this limit in MiB. The
// daemon shows limits from 1 GiB on in whole GiB, rounded down (1500M becomes 1G).
func limitMatches(answer string, limit uint64) bool {
	number, gib := strings.CutSuffix(answer, "G")
	if gib {
		limit /= 1024
	} else {
		number = strings.TrimSuffix(answer, "M")
	}
	have, err := strconv.ParseUint(number, 10, 64)
	return err == nil && number != answer && have == limit
}

// apply reads each default value of the control daemon that spec asks for. It sets those that
// differ, and returns an error if the daemon then still shows another value.
func (c control) apply(ctx context.Context, spec mps.Daemon) error {
	for _, s := range settings(spec) {
		if answer, err := c.ask(ctx, s.get); err != nil {
			return err
		} else if s.matches(answer) {
			continue
		}
		said, err := c.ask(ctx, s.set)
		if err != nil {
			return err
		}
		answer, err := c.ask(ctx, s.get)
		if err != nil {
			return err
		}
		if !s.matches(answer) {
			return fmt.Errorf("the control daemon does not keep %q: it answered %.200q, and then %.200q to %q",
				s.set, said, answer, s.get)
		}
	}
	return nil
}

// awaitAnswer returns nil once the control daemon answers. It returns an error when the daemon's
// process or the context ends first.
func (c control) awaitAnswer(ctx context.Context, p *process) error {
	pause := 10 * time.Millisecond
	for {
		_, err := c.ask(ctx, "get_server_list")
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return errEnded
		case <-ctx.Done():
			return fmt.Errorf("%w (last attempt: %w)", context.Cause(ctx), err)
		case <-time.After(pause):
		}
		pause = min(2*pause, time.Second)
	}
}

// errEnded means that the control daemon's process has ended. The daemon's log says why.
var errEnded = errors.New("the control daemon ended")
