package scan

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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

func TestMain(m *testing.M) {
	answer := func() error {
		return json.NewEncoder(os.Stdout).Encode(report{Node: &nvidia.Node{Driver: device.Driver{Version: "1.2"}}})
	}
	nvidiatest.Main(m, map[string]func() error{
		"scan":   func() error { return Serve(context.Background(), os.Stdin, os.Stdout) },
		"answer": answer,
		"answer and hang": func() error {
			_ = answer()
			select {}
		},
		"crash": func() error {
			fmt.Fprintln(os.Stderr, strings.Repeat("x", 5000)+" symbol lookup error")
			os.Exit(127) //nolint:forbidigo // this process is the child of a test
			return nil
		},
		"nonsense": func() error {
			fmt.Fprintln(os.Stdout, "hello")
			return nil
		},
		"nothing": func() error {
			fmt.Fprintln(os.Stdout, "{}")
			return nil
		},
		"hang": func() error {
			fmt.Fprintln(os.Stderr, "hanging")
			select {}
		},
	})
}

func childScan(t *testing.T, role string) func(context.Context) (nvidia.Node, error) {
	t.Setenv(nvidiatest.RoleVariable, role)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return Isolated(nvidiatest.NewHost(t).Paths(), self)
}

func TestIsolatedScanReportsResult(t *testing.T) {
	for _, role := range []string{"answer", "answer and hang"} {
		node, err := childScan(t, role)(t.Context())
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
		// The fake host's NVML library is no ELF file. The test expects that the parent gets the
		// child's error as a [nvidia.NotReadyError].
		"scan": {"cannot be loaded", "glibc"},
	} {
		_, err := childScan(t, role)(t.Context())
		for _, part := range says {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("%s: error is %v, want one with %q", role, err, part)
			}
		}
		var unready *nvidia.NotReadyError
		if errors.As(err, &unready) != (role == "scan") {
			t.Errorf("%s: error %v has the wrong type", role, err)
		}
		if err != nil && len(err.Error()) > 3000 {
			t.Errorf("%s: the error has %d bytes", role, len(err.Error()))
		}
	}
}

func TestIsolatedScanEndsWithContext(t *testing.T) {
	scan := childScan(t, "hang")
	ctx, cancel := context.WithTimeout(t.Context(), nvidiatest.HangLimit)
	defer cancel()
	if _, err := scan(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error is %v", err)
	}
}

func TestIsolatedScanChecksFilesFirst(t *testing.T) {
	h := nvidiatest.NewHost(t)
	h.Remove("driver/dev/nvidia-uvm")
	_, err := Isolated(h.Paths(), "/nonexistent")(t.Context())
	var unready *nvidia.NotReadyError
	if !errors.As(err, &unready) {
		t.Errorf("error is %v", err)
	}
	h.Node("driver/dev/nvidia-uvm")
	if _, err := Isolated(h.Paths(), "/nonexistent")(t.Context()); err == nil || !strings.Contains(err.Error(), "start the scanning process") {
		t.Errorf("error is %v", err)
	}
}

func TestIsolatedScanLimitsHungChildren(t *testing.T) {
	t.Setenv(nvidiatest.RoleVariable, "answer")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	h := nvidiatest.NewHost(t)
	i := isolatedScanner{paths: h.Paths(), command: []string{self}}
	ended := make(chan struct{})
	for range child.MaxStuck {
		i.children = append(i.children, &child.Process[report]{Gone: ended})
	}
	if _, err := i.scan(t.Context()); err == nil || !strings.Contains(err.Error(), "still hang in the NVIDIA driver") {
		t.Errorf("error is %v", err)
	}
	close(ended)
	if _, err := i.scan(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestServeScanStopsWhenItsParentIsGone(t *testing.T) {
	if err := Serve(t.Context(), strings.NewReader("no JSON"), &bytes.Buffer{}); err == nil {
		t.Error("invalid JSON was accepted")
	}
	var out bytes.Buffer
	if err := Serve(t.Context(), strings.NewReader(`{"driverRoot": "/nowhere", "devRoot": "/nowhere"}`), &out); err != nil ||
		!strings.Contains(out.String(), "notReady") {
		t.Errorf("%s, %v", &out, err)
	}
}

func TestReportSurvivesEncoding(t *testing.T) {
	for _, sent := range []report{
		describe(nvidia.Node{
			Driver: device.Driver{Version: "1", CUDAVersion: "2"},
			GPUs:   []nvidia.GPU{{GPU: device.GPU{PCIAddress: "0000:01:00.0"}, Edits: specs.ContainerEdits{Env: []string{"A=b"}}}},
			Common: specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: "/a", ContainerPath: "/b"}}}, Problems: []nvidia.Problem{{Message: "m"}},
		}, nil),
		describe(nvidia.Node{}, fmt.Errorf("wrapped: %w", &nvidia.NotReadyError{Reason: "r", Remedy: "do"})),
		describe(nvidia.Node{}, errors.New("broken")),
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
	if _, err := describe(nvidia.Node{}, &nvidia.NotReadyError{Reason: "r"}).result(); err == nil || err.Error() != "r" {
		t.Error(err)
	}
}

func TestCanceledScanReleasesHardware(t *testing.T) {
	t.Setenv(nvidiatest.RoleVariable, "hang")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	i := isolatedScanner{paths: nvidiatest.NewHost(t).Paths(), command: []string{self}}
	ctx, cancel := context.WithTimeout(t.Context(), nvidiatest.HangLimit)
	defer cancel()
	_, err = i.scan(ctx)
	if n := i.running(); n != 0 || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%d children still run: %v", n, err)
	}
	var hangs *nvidia.HangingError
	if errors.As(err, &hangs) {
		t.Errorf("a killable child was reported as hung: %v", err)
	}
}
