package mps

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/cuda"
)

// readyVariable tells a daemon in the background by which descriptor to say that it is ready.
const readyVariable = "NVMLSIM_MPS_READY"

const usage = `usage: nvidia-cuda-mps-control [-d | -f] [-multiuser-server]
  -d                 start the daemon in the background
  -f                 start the daemon in the foreground
  -multiuser-server  processes of all users are clients of one server
  -v                 print the version
Without an option: send the commands of the standard input to the daemon.
(A stand-in for simulated GPUs.)
`

// ControlMain is nvidia-cuda-mps-control. It gives the exit code.
func ControlMain(args []string) int {
	var background, foreground, multiUser bool
	for _, arg := range args {
		switch arg {
		case "-d":
			background = true
		case "-f":
			foreground = true
		case "-multiuser-server":
			multiUser = true
		case "-v":
			return printVersion()
		default:
			fmt.Fprint(os.Stderr, usage)
			return 1
		}
	}
	var err error
	switch {
	case background && foreground, multiUser && !background && !foreground:
		fmt.Fprint(os.Stderr, usage)
		return 1
	case multiUser && os.Getuid() != 0:
		err = errors.New("-multiuser-server is for the root user")
	case foreground:
		err = runDaemon(multiUser, true, func() {})
	case background && os.Getenv(readyVariable) != "":
		return backgroundMain(multiUser)
	case background:
		err = daemonize(args)
	default:
		lines := bufio.NewScanner(os.Stdin)
		err = sendCommands(func() (string, bool) { more := lines.Scan(); return lines.Text(), more }, func(text string) { fmt.Print(text) })
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func printVersion() int {
	driver, err := cuda.Attach()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Printf("CUDA MPS Control binary version: %d\n", driver.CUDAVersion())
	_ = driver.Close()
	return 0
}

// daemonize starts the daemon in a session of its own and returns when it listens.
func daemonize(args []string) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	ours, theirs, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = ours.Close() }()
	command := exec.Command(program, args...)
	command.Args[0] = os.Args[0]
	command.Env = append(os.Environ(), readyVariable+"=1", pipesVariable+"="+pipes(), logsVariable+"="+folderOf(logsVariable, defaultLogs))
	command.ExtraFiles = []*os.File{theirs}
	command.Dir = "/"
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = command.Start()
	_ = theirs.Close()
	if err != nil {
		return err
	}
	said, err := io.ReadAll(ours)
	if err != nil {
		return err
	}
	if problem, ready := strings.CutSuffix(string(said), "ready"); !ready {
		if problem == "" {
			problem = "the daemon ended before it was ready"
		}
		return errors.New(strings.TrimSpace(problem))
	}
	return command.Process.Release()
}

// backgroundMain is the daemon that daemonize started.
func backgroundMain(multiUser bool) int {
	_ = os.Unsetenv(readyVariable)
	syscall.CloseOnExec(3)
	starter := os.NewFile(3, "starter")
	err := runDaemon(multiUser, false, func() {
		_, _ = starter.WriteString("ready")
		_ = starter.Close()
	})
	if err != nil {
		_, _ = fmt.Fprintln(starter, err)
		return 1
	}
	return 0
}

// ServerMain is nvidia-cuda-mps-server.
func ServerMain(args []string) int {
	if slices.Contains(args, "-h") {
		fmt.Fprintln(os.Stderr, "nvidia-cuda-mps-server is started by nvidia-cuda-mps-control. (A stand-in for simulated GPUs.)")
		return 1
	}
	if err := runServer(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
