package stand

import (
	"context"
	"io"
	"path/filepath"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// Where the stand installs the chart, and the image that its values name.
const (
	Release   = "gpu-dra-driver"
	Namespace = "gpu-dra-driver"
	Image     = "localhost/gpu-dra-driver:test"
)

// Chart is the folder of the chart.
func Chart(root string) string { return filepath.Join(root, "deployments", "helm", "gpu-dra-driver") }

// Values is the file of ordinary values that describes a simulated node.
func Values(root string) string { return filepath.Join(root, "test", "e2e", "values.yaml") }

// InstallArguments are what `helm` is given to install or upgrade the chart and to wait until every plugin is ready. The other way to wait that helm 4
// knows, watcher, would on an upgrade wait for Pods of the supervisor of MPS daemons to be replaced, which nobody does.
func InstallArguments(root string, more ...string) []string {
	return append([]string{
		"upgrade", "--install", Release, Chart(root), "--namespace", Namespace, "--create-namespace",
		"--values", Values(root), "--wait=legacy", "--timeout", "10m",
	}, more...)
}

// Install installs or upgrades the chart.
func Install(ctx context.Context, c *cluster.Cluster, root string, more ...string) error {
	_, err := c.Helm(ctx, InstallArguments(root, more...)...)
	return err
}

// BuildImage builds the production image from the Dockerfile, unless nothing of it has changed, and returns its archive.
func BuildImage(ctx context.Context, root string, output io.Writer) (archive string, err error) {
	return cluster.BuildImage(ctx, cluster.ImageBuild{
		Dockerfile: filepath.Join(root, "Dockerfile"), Tag: Image, Arguments: map[string]string{"VERSION": "test"},
	}, output)
}
