package nvidia

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// roleVariable is the environment variable that tells the test binary which child process to act
// as. Without it, the test binary runs the tests.
const roleVariable = "NVIDIA_TEST_CHILD"

func TestMain(m *testing.M) {
	switch os.Getenv(roleVariable) {
	case "":
		m.Run()
	case "scan":
		if err := ServeScan(context.Background(), os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // this process is the child of a test
		}
	case "worker":
		runFakeWorker()
	case "partition":
		if err := ServePartitions(context.Background(), os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // this process is the child of a test
		}
	case "watch":
		if err := ServeWatch(context.Background(), os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // this process is the child of a test
		}
	case "hold", "subscribe":
		runForeignProcess(os.Getenv(roleVariable) == "subscribe")
	case "locked":
		runLockedWatcher()
	case "answer":
		_ = json.NewEncoder(os.Stdout).Encode(report{Node: &Node{Driver: device.Driver{Version: "1.2"}}})
	case "answer and hang":
		_ = json.NewEncoder(os.Stdout).Encode(report{Node: &Node{Driver: device.Driver{Version: "1.2"}}})
		select {}
	case "crash":
		fmt.Fprintln(os.Stderr, strings.Repeat("x", 5000)+" symbol lookup error")
		os.Exit(127) //nolint:forbidigo // this process is the child of a test
	case "nonsense":
		fmt.Fprintln(os.Stdout, "hello")
	case "nothing":
		fmt.Fprintln(os.Stdout, "{}")
	case "hang":
		fmt.Fprintln(os.Stderr, "hanging")
		select {}
	}
}

func child(t *testing.T, role string) func(context.Context) (Node, error) {
	t.Setenv(roleVariable, role)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return Isolated(newFakeHost(t).paths(), self)
}

func TestIsolatedScanReportsResult(t *testing.T) {
	for _, role := range []string{"answer", "answer and hang"} {
		node, err := child(t, role)(t.Context())
		if err != nil || node.Driver.Version != "1.2" {
			t.Errorf("%s: %v, %v", role, node, err)
		}
	}
}

func TestIsolatedScanSurvivesChildFailure(t *testing.T) {
	for role, says := range map[string][]string{
		"crash":    {"died without an answer", "exit status 127", "symbol lookup error"},
		"nonsense": {"died without an answer"},
		"nothing":  {"reported nothing"},
		// The fake host's NVML library is no ELF file. The test expects that the parent gets the child's
		// error as a [NotReadyError].
		"scan": {"cannot be loaded", "glibc"},
	} {
		_, err := child(t, role)(t.Context())
		for _, part := range says {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("%s: error is %v, want one with %q", role, err, part)
			}
		}
		var unready *NotReadyError
		if errors.As(err, &unready) != (role == "scan") {
			t.Errorf("%s: error %v has the wrong type", role, err)
		}
		if err != nil && len(err.Error()) > 3000 {
			t.Errorf("%s: the error has %d bytes", role, len(err.Error()))
		}
	}
}

func TestIsolatedScanEndsWithContext(t *testing.T) {
	scan := child(t, "hang")
	ctx, cancel := context.WithTimeout(t.Context(), hangLimit)
	defer cancel()
	if _, err := scan(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error is %v", err)
	}
}

func TestIsolatedScanChecksFilesFirst(t *testing.T) {
	h := newFakeHost(t)
	h.remove("driver/dev/nvidia-uvm")
	_, err := Isolated(h.paths(), "/nonexistent")(t.Context())
	var unready *NotReadyError
	if !errors.As(err, &unready) {
		t.Errorf("error is %v", err)
	}
	h.node("driver/dev/nvidia-uvm")
	if _, err := Isolated(h.paths(), "/nonexistent")(t.Context()); err == nil || !strings.Contains(err.Error(), "start the scanning process") {
		t.Errorf("error is %v", err)
	}
}

func TestIsolatedScanLimitsHungChildren(t *testing.T) {
	t.Setenv(roleVariable, "answer")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	h := newFakeHost(t)
	i := isolatedScanner{paths: h.paths(), command: []string{self}}
	i.stuck.Store(maxStuck)
	if _, err := i.scan(t.Context()); err == nil || !strings.Contains(err.Error(), "still hang in the NVIDIA driver") {
		t.Errorf("error is %v", err)
	}
	i.stuck.Store(0)
	if _, err := i.scan(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestServeScanStopsWhenItsParentIsGone(t *testing.T) {
	if err := ServeScan(t.Context(), strings.NewReader("no JSON"), &bytes.Buffer{}); err == nil {
		t.Error("invalid JSON was accepted")
	}
	var out bytes.Buffer
	if err := ServeScan(t.Context(), strings.NewReader(`{"driverRoot": "/nowhere", "devRoot": "/nowhere"}`), &out); err != nil ||
		!strings.Contains(out.String(), "notReady") {
		t.Errorf("%s, %v", &out, err)
	}
}

func TestReportSurvivesEncoding(t *testing.T) {
	for _, sent := range []report{
		describe(Node{
			Driver: device.Driver{Version: "1", CUDAVersion: "2"},
			GPUs:   []GPU{{GPU: device.GPU{PCIAddress: "0000:01:00.0"}, Edits: specs.ContainerEdits{Env: []string{"A=b"}}}},
			Common: specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: "/a", ContainerPath: "/b"}}}, Problems: []Problem{{Message: "m"}},
		}, nil),
		describe(Node{}, fmt.Errorf("wrapped: %w", &NotReadyError{Reason: "r", Remedy: "do"})),
		describe(Node{}, errors.New("broken")),
	} {
		data, err := json.Marshal(sent)
		if err != nil {
			t.Fatal(err)
		}
		var received report
		if err := json.Unmarshal(data, &received); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(sent, received); diff != "" {
			t.Error(diff)
		}
	}
	if _, err := describe(Node{}, &NotReadyError{Reason: "r"}).result(); err == nil || err.Error() != "r" {
		t.Error(err)
	}
}

func TestCanceledScanReleasesHardware(t *testing.T) {
	t.Setenv(roleVariable, "hang")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	i := isolatedScanner{paths: newFakeHost(t).paths(), command: []string{self}}
	ctx, cancel := context.WithTimeout(t.Context(), hangLimit)
	defer cancel()
	_, err = i.scan(ctx)
	if n := i.stuck.Load(); n != 0 || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%d children still run: %v", n, err)
	}
	var hangs *HangingError
	if errors.As(err, &hangs) {
		t.Errorf("a killable child was reported as hung: %v", err)
	}
}
