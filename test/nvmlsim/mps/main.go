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

// readyVariable is set in the environment of a daemon that daemonize started. Such a daemon reports
// on descriptor 3 that it is ready.
const readyVariable = "NVMLSIM_MPS_READY"

const help = `CUDA MPS Control, a stand-in for simulated GPUs.
  -d                 start the daemon in the background
  -f                 start the daemon in the foreground
  -multiuser-server  with -d or -f: processes of all users are clients of one server
Anything else: send the commands of the standard input to the daemon.
`

// ControlMain is the main function of nvidia-cuda-mps-control. It returns the exit code.
func ControlMain(args []string) int {
	if len(args) == 1 && args[0] == "-h" {
		fmt.Print(help)
		return 0
	}
	driver, err := cuda.Attach()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = driver.Close() }()
	mode, multiUser, known := readOptions(args, driver.Release())
	status := 0
	switch {
	case !known && driver.Release() >= releaseOptions:
		fmt.Print(help)
		return 1
	case multiUser && os.Getuid() != 0:
		err = errors.New("-multiuser-server is for the root user")
	case mode == "-f":
		status, err = runDaemon(driver, multiUser, true, func() {})
	case mode == "-d" && os.Getenv(readyVariable) != "":
		return backgroundMain(driver, multiUser)
	case mode == "-d":
		err = daemonize(args)
	default:
		lines := bufio.NewScanner(os.Stdin)
		err = sendCommands(func() (string, bool) { more := lines.Scan(); return lines.Text(), more }, func(text string) { fmt.Print(text) })
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return status
}

// readOptions parses the options. mode is -d, -f or empty; known is false if an option is unknown.
// With an older driver, a program with an unknown option runs as a client.
func readOptions(args []string, release int) (mode string, multiUser, known bool) {
	for _, arg := range args {
		switch {
		case arg == "-d" || arg == "-f":
			mode = arg
		case arg == "-multiuser-server" && release >= releaseMultiUser:
			multiUser = true
		default:
			return "", false, false
		}
	}
	return mode, multiUser, true
}

// daemonize starts the daemon in a new session, and returns when the daemon accepts connections.
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

// backgroundMain is the main function of the daemon process that daemonize started. It returns the
// exit code.
func backgroundMain(driver *cuda.Driver, multiUser bool) int {
	_ = os.Unsetenv(readyVariable)
	syscall.CloseOnExec(3)
	starter := os.NewFile(3, "starter")
	status, err := runDaemon(driver, multiUser, false, func() {
		_, _ = starter.WriteString("ready")
		_ = starter.Close()
	})
	if err != nil {
		_, _ = fmt.Fprintln(starter, err)
		return 1
	}
	return status
}

// ServerMain is the main function of nvidia-cuda-mps-server. It returns the exit code.
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
