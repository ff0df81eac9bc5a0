{{- define "gpu-dra-driver.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/*
The common part of the admission policies: requests of the plugin's account, and the node that its
token names. A policy may add more variables after it.
*/}}
{{- define "gpu-dra-driver.ofThePlugin" -}}
matchConditions:
  - name: is-the-plugin
    expression: request.userInfo.username == "system:serviceaccount:{{ .Release.Namespace }}:{{ include "gpu-dra-driver.serviceAccountName" . }}"
variables:
  - name: node
    expression: request.userInfo.?extra[?'authentication.kubernetes.io/node-name'][0].orValue('')
{{- end -}}

{{/*
How Prometheus scrapes a plugin. Its metrics name the node, and the namespace and Pod of claims,
which must not be renamed. Takes metrics.podMonitor or metrics.serviceMonitor.
*/}}
{{- define "gpu-dra-driver.scrape" -}}
interval: {{ .interval }}
honorLabels: true
relabelings:
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: node
{{- end -}}

{{/* Binds an admission policy. Takes a list: the chart's root and the policy's name. */}}
{{- define "gpu-dra-driver.denyBy" -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ index . 1 }}
  labels:
    {{- include "gpu-dra-driver.labels" (index . 0) | nindent 4 }}
spec:
  policyName: {{ index . 1 }}
  validationActions: [Deny]
{{- end -}}

{{/*
Limits a Pod's outgoing traffic to the API server, if its addresses are known. Takes
networkPolicy.apiServer.
*/}}
{{- define "gpu-dra-driver.toAPIServer" -}}
{{- with . -}}
egress:
  {{- range . }}
  - to:
      - ipBlock:
          cidr: {{ .cidr }}
    ports:
      - port: {{ .port }}
        protocol: TCP
  {{- end }}
{{- end -}}
{{- end -}}

{{/*
A Pod's token for the API server, in the directory where client-go looks. It differs from the volume
that Kubernetes would mount only in the token's lifetime. An automatically mounted token is valid
for a year (--service-account-extend-token-expiration of the API server, enabled by default). This
one expires within an hour. The kubelet renews the file before that, and client-go reads it again.
*/}}
{{- define "gpu-dra-driver.tokenVolume" -}}
- name: token
  projected:
    sources:
      - serviceAccountToken:
          path: token
          expirationSeconds: 3600
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
      - downwardAPI:
          items:
            - path: namespace
              fieldRef:
                apiVersion: v1
                fieldPath: metadata.namespace
{{- end -}}
{{- define "gpu-dra-driver.tokenMount" -}}
- name: token
  mountPath: /var/run/secrets/kubernetes.io/serviceaccount
  readOnly: true
{{- end -}}

{{/* Short enough for the longest suffix: names have at most 63 characters. */}}
{{- define "gpu-dra-driver.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "gpu-dra-driver.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "gpu-dra-driver.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "gpu-dra-driver.pluginName" -}}
{{- include "gpu-dra-driver.fullname" . }}-kubelet-plugin
{{- end -}}

{{/* "true" if MPS daemons may be needed: for MPS, or for fractions, which MPS enforces. */}}
{{- define "gpu-dra-driver.mps" -}}
{{- if or .Values.mps.enabled (contains "fractions" (include "gpu-dra-driver.shareKinds" .)) }}true{{ end -}}
{{- end -}}

{{/* The host of the MPS daemons. */}}
{{- define "gpu-dra-driver.supervisorName" -}}
{{- include "gpu-dra-driver.fullname" . }}-mps
{{- end -}}

{{- define "gpu-dra-driver.claimPolicyName" -}}
{{- include "gpu-dra-driver.fullname" . }}-claim-status
{{- end -}}

{{- define "gpu-dra-driver.parameterPolicyName" -}}
{{- include "gpu-dra-driver.fullname" . }}-parameters
{{- end -}}

{{- define "gpu-dra-driver.uninstallName" -}}
{{- include "gpu-dra-driver.fullname" . }}-uninstall
{{- end -}}

{{- define "gpu-dra-driver.selectorLabels" -}}
app.kubernetes.io/name: {{ include "gpu-dra-driver.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: kubelet-plugin
{{- end -}}

{{- define "gpu-dra-driver.supervisorSelectorLabels" -}}
app.kubernetes.io/name: {{ include "gpu-dra-driver.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: mps-supervisor
{{- end -}}

{{- define "gpu-dra-driver.labels" -}}
app.kubernetes.io/name: {{ include "gpu-dra-driver.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "gpu-dra-driver.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "gpu-dra-driver.pluginName" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: serviceAccount.create=false requires the name of an existing ServiceAccount"
    .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/*
Empty if the hook makes its own account. That is allowed only if the chart may make accounts and
grant rights.
*/}}
{{- define "gpu-dra-driver.uninstallAccount" -}}
{{- if and (not .Values.uninstall.serviceAccountName) (not (and .Values.serviceAccount.create .Values.rbac.create)) -}}
{{- $problem := print "uninstall.serviceAccountName: with serviceAccount.create=false or rbac.create=false "
    "the uninstall hook makes no account and no rights." -}}
{{- fail (print $problem " Set uninstall.serviceAccountName to an existing account with the rights in "
    "docs/security.md, or set uninstall.enabled=false") -}}
{{- end -}}
{{- .Values.uninstall.serviceAccountName -}}
{{- end -}}

{{/* The user's selector, which it takes, plus Linux: the image is for Linux. */}}
{{- define "gpu-dra-driver.nodeSelector" -}}
{{- merge (dict "kubernetes.io/os" "linux") (default dict .) | toYaml -}}
{{- end -}}

{{/*
The affinity of both DaemonSets: the user's, and with nodes=labelled also one of the labels that say
that a node has an NVIDIA GPU. They are from the GPU Operator, its Node Feature Discovery, and Node
Feature Discovery's default configuration (PCI class 0302 or 0300, vendor 10de).
*/}}
{{- define "gpu-dra-driver.affinity" -}}
{{- $affinity := deepCopy (default dict .Values.affinity) -}}
{{- if eq .Values.nodes "labelled" -}}
{{- $node := $affinity.nodeAffinity | default dict -}}
{{- if hasKey $node "requiredDuringSchedulingIgnoredDuringExecution" -}}
{{- $problem := "nodes: labelled makes the required node affinity, and affinity.nodeAffinity has one too." -}}
{{- fail (print $problem " Leave one of them out. A nodeSelector may be combined with nodes=labelled") -}}
{{- end -}}
{{- $terms := list -}}
{{- range list "nvidia.com/gpu.present" "feature.node.kubernetes.io/pci-10de.present"
    "feature.node.kubernetes.io/pci-0302_10de.present" "feature.node.kubernetes.io/pci-0300_10de.present" -}}
{{- $is := dict "key" . "operator" "In" "values" (list "true") -}}
{{- $terms = append $terms (dict "matchExpressions" (list $is)) -}}
{{- end -}}
{{- $required := dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) -}}
{{- $_ := set $affinity "nodeAffinity" (merge $required $node) -}}
{{- end -}}
{{- with $affinity }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{- define "gpu-dra-driver.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{/* Directories below the kubelet's root, at the same path in the container and on the host. */}}
{{- define "gpu-dra-driver.pluginsDir" -}}
{{ .Values.kubeletRootDir }}/plugins
{{- end -}}
{{- define "gpu-dra-driver.pluginDir" -}}
{{ include "gpu-dra-driver.pluginsDir" . }}/gpu.nvidia.com
{{- end -}}
{{- define "gpu-dra-driver.registrarDir" -}}
{{ .Values.kubeletRootDir }}/plugins_registry
{{- end -}}

{{/*
The host's directories for hooks that need a mount of their own, as YAML: volume: directory. By
default the plugin chooses between the one in /var/lib and the one in /run, since a distribution may
mount either noexec. Every host can make both, but not one in /opt. A directory that the user
chooses must hide neither the image's files nor another mount of the container.
*/}}
{{- define "gpu-dra-driver.hookDirs" -}}
{{- if not .Values.hookPath -}}
hooks: /var/lib/gpu-dra-driver
hooks-run: /run/gpu-dra-driver
{{- else if (not (hasPrefix (printf "%s/" (include "gpu-dra-driver.pluginsDir" .)) .Values.hookPath)) -}}
{{- $dir := dir .Values.hookPath -}}
{{- $image := "/|/usr|(/usr)?/(s?bin|lib(64)?(/[^/]+-linux-gnu)?)|/etc|/var|(/var)?/run" -}}
{{- $mounts := "/(etc/gpu-dra-driver|(var/)?run/secrets|dev|proc|sys|host|driver-root)(/.*)?" -}}
{{- if or (regexMatch (printf "^(%s|%s)$" $image $mounts) $dir) (has $dir (list .Values.cdiRoot (include "gpu-dra-driver.registrarDir" .))) -}}
{{- $problem := print "hookPath: " $dir " cannot be the hook's directory: the chart mounts it into the plugin's "
    "container, where it would hide files that the plugin needs." -}}
{{- fail (print $problem " Choose a directory for the hook alone, such as /opt/nvidia/bin, or leave hookPath empty") -}}
{{- end -}}
hooks: {{ $dir }}
{{- end -}}
{{- end -}}

{{/*
The driver root is mounted through its parent directory. A driver container mounts its root file
system late, removes the directory when it stops and makes a new one when it starts again. A mount
of the directory itself would keep showing the removed one.
*/}}
{{- define "gpu-dra-driver.driverRootSource" -}}
{{- dir .Values.driverRoot -}}
{{- end -}}
{{- define "gpu-dra-driver.driverRootMount" -}}
{{- if eq .Values.driverRoot "/" -}}
/driver-root
{{- else -}}
/driver-root/{{ base .Values.driverRoot }}
{{- end -}}
{{- end -}}

{{/*
A DeviceClass. Takes a list: the chart's root, the class's name, a CEL expression added to the
driver's name, an extended resource or "", the value that makes the class, what to do while another
release owns the class, and the class's other values. helm would refuse a class of another release
too, with an unclear message about metadata. A class without a release is left to helm and its
--take-ownership.
*/}}
{{- define "gpu-dra-driver.deviceClass" -}}
{{- $root := index . 0 }}{{ $name := index . 1 }}{{ $expression := index . 2 }}{{ $resource := index . 3 -}}
{{- $values := index . 6 }}
{{- $owner := lookup "resource.k8s.io/v1" "DeviceClass" "" $name | default dict | dig "metadata" "annotations" dict }}
{{- $release := get $owner "meta.helm.sh/release-name" }}
{{- $namespace := get $owner "meta.helm.sh/release-namespace" }}
{{- if and $release (or (ne $release $root.Release.Name) (ne $namespace $root.Release.Namespace)) }}
{{- fail (printf "%s: DeviceClass %s belongs to release %s in namespace %s. %s" (index . 4) $name $release $namespace (index . 5)) }}
{{- end -}}
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata:
  name: {{ $name }}
  labels:
    {{- include "gpu-dra-driver.labels" $root | nindent 4 }}
    {{- with $values.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  selectors:
    - cel:
        expression: device.driver == 'gpu.nvidia.com' && {{ $expression }}
    {{- range $values.selectors }}
    - cel:
        expression: {{ . | quote }}
    {{- end }}
  {{- with $values.config }}
  config:
    - opaque:
        driver: gpu.nvidia.com
        parameters:
          {{- toYaml . | nindent 10 }}
  {{- end }}
  {{- with $resource }}
  extendedResourceName: {{ . }}
  {{- end }}
{{- end -}}

{{/*
The name of a MIG profile in names of DeviceClasses and extended resources, which cannot have a "+":
1g.10gb.me for 1g.10gb+me, as NVIDIA's device plugin writes it.
*/}}
{{- define "gpu-dra-driver.profileName" -}}
mig-{{ . | replace "+" "." }}
{{- end -}}

{{/* The extended resource of an entry of deviceClasses.migProfiles. */}}
{{- define "gpu-dra-driver.profileResource" -}}
{{- if hasKey . "extendedResourceName" -}}
{{- .extendedResourceName -}}
{{- else -}}
nvidia.com/{{ include "gpu-dra-driver.profileName" .profile }}
{{- end -}}
{{- end -}}

{{/* Not empty if the chart makes class shared.gpu.nvidia.com. */}}
{{- define "gpu-dra-driver.sharesAnything" -}}
{{- if and .Values.deviceClasses.shared.enabled (include "gpu-dra-driver.shareKinds" .) -}}
true
{{- end -}}
{{- end -}}

{{/*
The extended resource of class gpu.nvidia.com. This class has one by default, so it yields to a
class of shares or of a profile with the same resource.
*/}}
{{- define "gpu-dra-driver.gpuResource" -}}
{{- $taken := list -}}
{{- if include "gpu-dra-driver.sharesAnything" . }}{{ $taken = append $taken .Values.deviceClasses.shared.extendedResourceName }}{{ end -}}
{{- range .Values.deviceClasses.migProfiles }}{{ $taken = append $taken (include "gpu-dra-driver.profileResource" .) }}{{ end -}}
{{- $own := .Values.deviceClasses.gpu.extendedResourceName -}}
{{- if and .Values.deviceClasses.gpu.enabled (not (has $own $taken)) -}}
{{- $own -}}
{{- end -}}
{{- end -}}

{{/* The plugin's configuration file. The names of its node and Pod come from the environment. */}}
{{- define "gpu-dra-driver.config" -}}
daemonsetName: {{ include "gpu-dra-driver.pluginName" . | quote }}
pluginDir: {{ include "gpu-dra-driver.pluginDir" . | quote }}
registrarDir: {{ include "gpu-dra-driver.registrarDir" . | quote }}
cdiRoot: {{ .Values.cdiRoot | quote }}
driverRoot: {{ .Values.driverRoot | quote }}
driverRootMount: {{ include "gpu-dra-driver.driverRootMount" . | quote }}
{{- with .Values.devRoot }}
devRoot: {{ . | quote }}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{- $dirs := list }}
{{- range . }}{{ $dirs = append $dirs .mountPath }}{{ end }}
driverDirs: {{ join "," $dirs | quote }}
{{- end }}
sysfsRoot: /host/sys
procRoot: /host/proc
devCharDir: /dev/char
{{- with .Values.ldconfigPath }}
ldconfigPath: {{ . | quote }}
{{- end }}
{{- with .Values.hookPath }}
hookPath: {{ . | quote }}
{{- end }}
{{- with .Values.criSocket }}
criSocket: /host/cri/{{ base . }}
{{- end }}
settings: /etc/gpu-dra-driver/settings.yaml
mps: {{ include "gpu-dra-driver.mps" . | default "false" }}
releaseLabels: {{ join "," .Values.releaseLabels | quote }}
devicePluginConflict: {{ .Values.devicePluginConflict | quote }}
requireValidation: {{ .Values.requireValidation }}
claimStatus: {{ .Values.claimStatus.enabled }}
deviceMetadata: {{ .Values.deviceMetadata.enabled }}
httpAddress: ":{{ .Values.metrics.port }}"
kubeApiQps: {{ .Values.kubeAPI.qps }}
kubeApiBurst: {{ .Values.kubeAPI.burst }}
v: {{ .Values.logVerbosity }}
loggingFormat: {{ .Values.logFormat }}
{{- end -}}

{{/* The plugin's settings file. Its form is that of the values. */}}
{{- define "gpu-dra-driver.settings" -}}
{{- pick .Values "mig" "passthrough" "shares" "health" "xidRules" "configurations" "devicePluginLabel" | toYaml -}}
{{- end -}}

{{/* "true" if any GPU of any node is offered to virtual machines. */}}
{{- define "gpu-dra-driver.passthrough" -}}
{{- $on := false -}}
{{- range prepend (values (.Values.configurations | default dict)) .Values }}{{ with .passthrough -}}
{{- if .enabled }}{{ $on = true }}{{ end -}}
{{- range .rules }}{{ if .enabled }}{{ $on = true }}{{ end }}{{ end -}}
{{- end }}{{ end -}}
{{- if $on }}true{{ end -}}
{{- end -}}

{{/* The kinds of shares that the values offer, separated by spaces. */}}
{{- define "gpu-dra-driver.shareKinds" -}}
{{- range prepend (values (.Values.configurations | default dict)) .Values }}{{ range .shares }}{{ if ne .kind "off" }}{{ .kind }} {{ end }}{{ end }}{{ end -}}
{{- end -}}
