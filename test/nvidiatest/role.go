package nvidiatest

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"
)

// RoleVariable is the environment variable that tells the test binary which child process to act
// as. Without it, the test binary runs the tests.
const RoleVariable = "NVIDIA_TEST_CHILD"

// Main is the TestMain of a package whose tests start the test binary as a child process.
func Main(m *testing.M, roles map[string]func() error) {
	role := os.Getenv(RoleVariable)
	switch role {
	case "":
		m.Run()
		return
	case "hold", "subscribe":
		runForeignProcess(role == "subscribe")
	}
	run := roles[role]
	if run == nil {
		run = func() error { return fmt.Errorf("no child process has the role %q", role) }
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// Role returns a command that runs the test binary as a child process with this role.
func (s Site) Role(role string) []string {
	self, err := os.Executable()
	if err != nil {
		s.T.Fatal(err)
	}
	return []string{"env", RoleVariable + "=" + role, self}
}

// StopWorkers ends the worker processes of a cut.Partitions at the end of a test. It gives up on
// those that hang.
func StopWorkers(p interface {
	StopWorkers(ctx context.Context) error
}) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second) // the test's context has ended
	defer cancel()
	_ = p.StopWorkers(ctx)
}
