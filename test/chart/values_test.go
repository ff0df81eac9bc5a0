package chart

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestValueSetsRenderValidObjects(t *testing.T) {
	for name, args := range valueSets {
		t.Run(name, func(t *testing.T) {
			objects, text := render(t, args...)
			if len(objects) < 2 {
				t.Errorf("rendered %d objects:\n%s", len(objects), text)
			}
			for _, object := range objects {
				m := object.(metav1.Object)
				switch object.(type) {
				case *corev1.ServiceAccount, *corev1.ConfigMap, *corev1.Service, *corev1.ResourceQuota, *appsv1.DaemonSet, *rbacv1.Role,
					*rbacv1.RoleBinding, *batchv1.Job, *networkingv1.NetworkPolicy:
					if m.GetNamespace() != namespace {
						t.Errorf("%T %s is in namespace %q, want the release's", object, m.GetName(), m.GetNamespace())
					}
				default:
					if m.GetNamespace() != "" {
						t.Errorf("%T %s has no namespace, but says %q", object, m.GetName(), m.GetNamespace())
					}
				}
			}
		})
	}
}

func TestDeviceMetadataIsOnUnlessSwitchedOff(t *testing.T) {
	for value, want := range map[string]string{"": "deviceMetadata: true", "deviceMetadata.enabled=false": "deviceMetadata: false"} {
		arguments := []string{}
		if value != "" {
			arguments = append(arguments, "--set", value)
		}
		if _, text := render(t, arguments...); !strings.Contains(text, want) {
			t.Errorf("with %q the chart does not render %q", value, want)
		}
	}
}

func TestSchemaRefusesInvalidValues(t *testing.T) {
	for name, c := range map[string]struct{ set, want string }{
		"an unknown key":                {"driverroot=/x", "driverroot"},
		"an unknown nested key":         {"hostPaths.run=/run", "run"},
		"a relative path":               {"cdiRoot=run/cdi", "cdiRoot"},
		"a path with ..":                {"driverRoot=/opt/../etc", "driverRoot"},
		"a path with a final slash":     {"kubeletRootDir=/var/lib/kubelet/", "kubeletRootDir"},
		"a verbosity of letters":        {"logVerbosity=high", "logVerbosity"},
		"a rate of zero":                {"kubeAPI.qps=0", "qps"},
		"no image":                      {"image.repository=", "repository"},
		"a duration without a unit":     {"uninstall.timeout=240", "timeout"},
		"an argument without dashes":    {"extraArgs[0]=version", "extraArgs"},
		"an unknown policy":             {"mig.policy=never", "policy"},
		"profiles for static":           {"mig.profiles={1g.10gb}", "profiles"},
		"an invalid profile":            {"mig.policy=dynamic,mig.profiles={1g.10gb,small}", "profiles"},
		"a policy that is a Boolean":    {"mig.policy=false", "policy"},
		"a rule without a policy":       {"mig.rules[0].gpus=GPU-1", "policy"},
		"a rule with an unknown key":    {"mig.rules[0].policy=static,mig.rules[0].gpu=GPU-1", "gpu"},
		"policies in a string":          {"mig=dynamic", "mig"},
		"shares in a string":            {"shares=fractions", "shares"},
		"shares of no kind":             {"shares[0].kind=half", "kind"},
		"shares without a number":       {"shares[0].kind=shares", "count"},
		"fractions with a number":       {"shares[0].kind=fractions,shares[0].count=4", "shares"},
		"a single share":                {"shares[0].kind=shares,shares[0].count=1", "count"},
		"more shares than processes":    {"shares[0].kind=shares,shares[0].count=1001", "count"},
		"shares of one GPU by two ways": {"shares[0].kind=fractions,shares[0].index=0,shares[0].gpus=GPU-1", "shares"},
		"a state that does not exist":   {"health.effects.dead=none", "dead"},
		"an effect that does not exist": {"health.effects.lost=Evict", "lost"},
		"an XID without a number":       {"xidRules.gone=app", "xidRules"},
		"a weight that does not exist":  {"xidRules.79=dead", "79"},
		"a network without a prefix":    {`networkPolicy.apiServer[0].cidr=10.0.0.1,networkPolicy.apiServer[0].port=443`, "cidr"},
		"an API server without port":    {`networkPolicy.apiServer[0].cidr=10.0.0.1/32`, "port"},
		"an update strategy of MPS":     {"mps.updateStrategy.type=RollingUpdate", "updateStrategy"},
		"too little shared memory":      {"mps.sharedMemoryMiB=63", "sharedMemoryMiB"},
		"nodes by another way":          {"nodes=all", "nodes"},
		"a common label of helm's":      {`commonLabels.helm\.sh/chart=x`, "helm.sh/chart"},
		"a class's config without kind": {"deviceClasses.gpu.config.apiVersion=resource.nvidia.com/v1beta1", "config"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := template(t, "--set", c.set)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("--set %s: %v, want an error that names %s", c.set, err, c.want)
			}
		})
	}
}

func TestRequireValidationReachesPlugin(t *testing.T) {
	for value, want := range map[string]string{"false": "requireValidation: false", "true": "requireValidation: true"} {
		if _, text := render(t, "--set", "requireValidation="+value); !strings.Contains(text, want) {
			t.Errorf("requireValidation=%s does not render %s", value, want)
		}
	}
	if _, text := render(t); !strings.Contains(text, "requireValidation: false") {
		t.Error("validation is not off by default")
	}
}

// everything is the set of values that enables all features that are off by default.
var everything = []string{
	"--set", "metrics.service.enabled=true", "--set", "metrics.podMonitor.enabled=true", "--set", "metrics.podMonitor.labels.team=gpu",
	"--set", "metrics.prometheusRule.enabled=true", "--set", "metrics.dashboards.enabled=true",
	"--set", "criticalPodsQuota.enabled=true", "--set", "deviceClasses.gpu.extendedResourceName=nvidia.com/gpu",
	"--set-json", `deviceClasses.migProfiles=[{"profile":"1g.10gb"},{"profile":"1g.10gb+me"}]`, "--set-json",
	`mig.rules=[{"gpus":"NVIDIA A100*","policy":"dynamic"},{"gpus":"NVIDIA H100*","policy":"adopt","profiles":["1g.10gb","1g.10gb+me"]}]`,
	"--set", "openshift.privilegedSCC=true", "--set", "mps.enabled=true", "--set", "passthrough.rules[0].enabled=true",
	"--set-json", `networkPolicy={"metricsFrom":[{"podSelector":{"matchLabels":{"app":"prometheus"}}}],` +
		`"apiServer":[{"cidr":"10.0.0.10/32","port":6443},{"cidr":"fd00::10/128","port":6443}]}`,
	"--set", "image.digest=sha256:" + strings.Repeat("0a", 32), "--set", "imagePullSecrets[0].name=pull",
	"--set", "driverRoot=/run/nvidia/driver", "--set", "devRoot=/driver-root/driver", "--set", "hookPath=/opt/nvidia/bin/nvidia-cdi-hook",
	"--set", "kubeletRootDir=/var/lib/k0s/kubelet", "--set", "criSocket=/run/k0s/containerd.sock",
	"--set", "nodeSelector.gpu=yes", "--set", "extraArgs[0]=--claim-grace=10m", "--set", "extraEnv[0].name=A", "--set",
	"extraEnv[0].value=b",
	"--set", "extraVolumes[0].name=more", "--set", "extraVolumes[0].hostPath.path=/more",
	"--set", "extraVolumeMounts[0].name=more", "--set", "extraVolumeMounts[0].mountPath=/more",
	"--set", "podLabels.a=b", "--set", "podAnnotations.a=b", "--set", "serviceAccount.annotations.a=b", "--set", "uninstall.force=true",
	"--set-json", `affinity={"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{` +
		`"nodeSelectorTerms":[{"matchExpressions":[{"key":"a","operator":"Exists"}]}]}}}`,
}

// nothing is the set of values that disables all features that can be disabled.
var nothing = []string{
	"--set", "rbac.create=false", "--set", "serviceAccount.create=false", "--set", "serviceAccount.name=mine", "--set",
	"admissionPolicy.enabled=false", "--set", "networkPolicy.enabled=false",
	"--set", "deviceClasses.gpu.enabled=false", "--set", "deviceClasses.mig.enabled=false", "--set", "uninstall.enabled=false",
	"--set", "criSocket=", "--set", "priorityClassName=",
	"--set-json", "tolerations=[]", "--set", "claimStatus.enabled=false",
}

var valueSets = map[string][]string{
	"defaults":     nil,
	"everything":   everything,
	"nothing":      nothing,
	"test cluster": {"--values", "../e2e/values.yaml"},
}
