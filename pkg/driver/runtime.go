package driver

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
)

// runtimeRefusesCDI asks the container runtime whether it will inject the specs in cdiRoot.
// containerd 1.7 has enable_cdi = false by default, and then runs Pods without their devices,
// silently. A non-empty code and its message say why not and what to change. Runtimes that do not
// tell are taken to do it.
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

// refusesCDI reads containerd's CRI configuration as its status reports it. Fields that are not there are not judged.
func refusesCDI(config, cdiRoot string) (code, message string) {
	var c struct {
		EnableCDI   *bool    `json:"enableCDI"`
		CDISpecDirs []string `json:"cdiSpecDirs"`
	}
	if json.Unmarshal([]byte(config), &c) != nil {
		return "", ""
	}
	if c.EnableCDI != nil && !*c.EnableCDI {
		return codeCDIDisabled, "CDI is switched off in the container runtime, so Pods would run without their GPUs: set enable_cdi = true in the CRI section of /etc/containerd/config.toml and restart containerd"
	}
	if c.CDISpecDirs != nil && !slices.ContainsFunc(c.CDISpecDirs, func(dir string) bool { return sameDir(dir, cdiRoot) }) {
		return codeCDIDirectory, fmt.Sprintf("the container runtime reads CDI specs from %q, not from %s: add it to cdi_spec_dirs in the CRI section of /etc/containerd/config.toml and restart containerd, or set cdiRoot to one of its directories",
			c.CDISpecDirs, cdiRoot)
	}
	return "", ""
}

// sameDir takes /run and /var/run for one, as the file hierarchy does.
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
