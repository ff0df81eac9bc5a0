package nodeview

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/klog/v2"
)

// These are the codes of the conditions that RuntimeCheck reports.
const (
	CodeCDIDisabled  = "cdi-disabled"
	CodeCDIDirectory = "cdi-directory"
)

// RuntimeCheck asks the container runtime whether it reads the driver's CDI specs. If the runtime
// does not answer, the node's readiness does not change.
type RuntimeCheck struct {
	// Socket is the runtime's CRI socket. CDIRoot is the directory of the driver's CDI specs.
	Socket, CDIRoot string
}

// Source implements [Check].
func (r RuntimeCheck) Source() string { return "runtime" }

// Look implements [Check].
func (r RuntimeCheck) Look(ctx context.Context) (*Condition, bool) {
	if r.Socket == "" {
		return nil, false
	}
	code, message, err := runtimeRefusesCDI(ctx, r.Socket, r.CDIRoot)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Failed to ask the container runtime about CDI", "err", err)
		return nil, false
	}
	if code == "" {
		return nil, true
	}
	return &Condition{Code: code, Message: message}, true
}

// runtimeRefusesCDI asks the container runtime whether it reads CDI specs from cdiRoot. If it does
// not, code and message say why and what to change. Otherwise, or if the runtime does not say, both
// are empty. By default containerd 1.7 has enable_cdi = false and then silently runs Pods without
// their devices.
func runtimeRefusesCDI(ctx context.Context, socket, cdiRoot string) (code, message string, _ error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return "", "", fmt.Errorf("connect to the container runtime at %s: %w", socket, err)
	}
	defer func() { _ = conn.Close() }()
	status, err := runtimeapi.NewRuntimeServiceClient(conn).Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
	if err != nil {
		return "", "", fmt.Errorf("ask the container runtime at %s for its status: %w", socket, err)
	}
	code, message = refusesCDI(status.GetInfo()["config"], cdiRoot)
	return code, message, nil
}

// refusesCDI looks for CDI support in config, the CRI configuration in containerd's status. If CDI
// is off or cdiRoot is not read, it returns a code and a message for admins, otherwise two empty
// strings. Missing fields count as support for CDI.
func refusesCDI(config, cdiRoot string) (code, message string) {
	var c struct {
		EnableCDI   *bool    `json:"enableCDI"`
		CDISpecDirs []string `json:"cdiSpecDirs"`
	}
	if json.Unmarshal([]byte(config), &c) != nil {
		return "", ""
	}
	if c.EnableCDI != nil && !*c.EnableCDI {
		return CodeCDIDisabled, "CDI is switched off in the container runtime, so Pods would run without their GPUs: " +
			"set enable_cdi = true in the CRI section of /etc/containerd/config.toml and restart containerd"
	}
	isRoot := func(dir string) bool { return sameDir(dir, cdiRoot) }
	if c.CDISpecDirs != nil && !slices.ContainsFunc(c.CDISpecDirs, isRoot) {
		return CodeCDIDirectory, fmt.Sprintf("the container runtime reads CDI specs from %q, not from %s: "+
			"add it to cdi_spec_dirs in the CRI section of /etc/containerd/config.toml and restart containerd, "+
			"or set cdiRoot to one of its directories", c.CDISpecDirs, cdiRoot)
	}
	return "", ""
}

// sameDir reports whether a and b are the same directory. /run and /var/run are the same according
// to the Filesystem Hierarchy Standard.
func sameDir(a, b string) bool {
	canonical := func(p string) string {
		p = filepath.Clean(p)
		if rel, err := filepath.Rel("/var/run", p); err == nil && filepath.IsLocal(rel) {
			return filepath.Join("/run", rel)
		}
		return p
	}
	return canonical(a) == canonical(b)
}
