// SPDX-License-Identifier: Apache-2.0
// A GPT trainer in one C file, in the manner of llm.c: all parameters in one allocation, layers as [L, ...] arrays, the
// head tied to the token embedding, gradients and AdamW moments beside them. It reads a checkpoint and trains on
// made-up text.
//   train_gpt make FILE          writes a checkpoint with random weights
//   train_gpt FILE [STEPS]       trains from it
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 6, TIME = 32 };

typedef struct {
  int max_time, vocabulary, layers, heads, channels;
} Config;

enum { TENSORS = 16, ACTIVATIONS = 14 };
typedef struct {
  float *wte, *wpe;                                  // (V, C), (max_time, C)
  float *ln1w, *ln1b, *qkvw, *qkvb, *projw, *projb;  // (L, C) (L, C) (L, 3C, C) (L, 3C) (L, C, C) (L, C)
  float *ln2w, *ln2b, *fcw, *fcb, *outw, *outb;      // (L, C) (L, C) (L, 4C, C) (L, 4C) (L, C, 4C) (L, C)
  float *lnfw, *lnfb;                                // (C), (C)
} Parameters;

typedef struct {
  float *x, *ln1, *ln1s, *qkv, *att, *mix, *mid, *ln2, *ln2s, *fc, *gelu;  // by layer; x has one more
  float *lnf, *lnfs, *probs;                                               // (B, T, C), (B, T, 2), (B, T, V)
} Activations;

typedef struct {
  Config config;
  size_t sizes[TENSORS], parameters;
  Parameters params, grads;
  float *params_memory, *grads_memory, *m_memory, *v_memory;
  Activations acts, grad_acts;
  float *acts_memory, *grad_acts_memory;
  size_t activations;
  int batch;
  int const *inputs, *targets;
  double loss;
} Model;

static void* allocate(size_t count, size_t size) {
  void* memory = calloc(count, size);
  if (memory == NULL) {
    fprintf(stderr, "out of memory\n");
    exit(1);
  }
  return memory;
}

// Kernels. Backward adds to its gradients.

static void embedding_forward(float* out, int const* tokens, float const* wte, float const* wpe, int rows, int T,
                              int C) {
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < C; i++) out[r * C + i] = wte[tokens[r] * C + i] + wpe[r % T * C + i];
}
static void embedding_backward(float* dwte, float* dwpe, float const* dout, int const* tokens, int rows, int T, int C) {
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < C; i++) {
      dwte[tokens[r] * C + i] += dout[r * C + i];
      dwpe[r % T * C + i] += dout[r * C + i];
    }
}

static void matmul_forward(float* out, float const* in, float const* weight, float const* bias, int rows, int C,
                           int OC) {
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < OC; o++) {
      float sum = bias != NULL ? bias[o] : 0.0f;
      for (int i = 0; i < C; i++) sum += in[r * C + i] * weight[o * C + i];
      out[r * OC + o] = sum;
    }
}
static void matmul_backward(float* din, float* dweight, float* dbias, float const* dout, float const* in,
                            float const* weight, int rows, int C, int OC) {
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < OC; o++) {
      float const d = dout[r * OC + o];
      if (dbias != NULL) dbias[o] += d;
      for (int i = 0; i < C; i++) {
        din[r * C + i] += d * weight[o * C + i];
        dweight[o * C + i] += d * in[r * C + i];
      }
    }
}

static void layernorm_forward(float* out, float* stats, float const* in, float const* weight, float const* bias,
                              int rows, int C) {
  for (int r = 0; r < rows; r++) {
    float mean = 0.0f, variance = 0.0f;
    for (int i = 0; i < C; i++) mean += in[r * C + i] / (float)C;
    for (int i = 0; i < C; i++) variance += (in[r * C + i] - mean) * (in[r * C + i] - mean) / (float)C;
    float const scale = 1.0f / sqrtf(variance + 1e-5f);
    for (int i = 0; i < C; i++) out[r * C + i] = (in[r * C + i] - mean) * scale * weight[i] + bias[i];
    stats[2 * r] = mean;
    stats[2 * r + 1] = scale;
  }
}
static void layernorm_backward(float* din, float* dweight, float* dbias, float const* dout, float const* in,
                               float const* weight, float const* stats, int rows, int C) {
  for (int r = 0; r < rows; r++) {
    float const mean = stats[2 * r], scale = stats[2 * r + 1];
    float sum = 0.0f, product = 0.0f;
    for (int i = 0; i < C; i++) {
      float const norm = (in[r * C + i] - mean) * scale, d = weight[i] * dout[r * C + i];
      dbias[i] += dout[r * C + i];
      dweight[i] += norm * dout[r * C + i];
      sum += d / (float)C;
      product += d * norm / (float)C;
    }
    for (int i = 0; i < C; i++) {
      float const norm = (in[r * C + i] - mean) * scale;
      din[r * C + i] += (weight[i] * dout[r * C + i] - sum - norm * product) * scale;
    }
  }
}

static void attention_forward(float* out, float* att, float const* qkv, int B, int T, int C, int H) {
  int const S = C / H;
  float const scale = 1.0f / sqrtf((float)S);
  for (int b = 0; b < B; b++)
    for (int h = 0; h < H; h++)
      for (int t = 0; t < T; t++) {
        float const* q = qkv + (b * T + t) * 3 * C + h * S;
        float* a = att + ((b * H + h) * T + t) * T;
        float* o = out + (b * T + t) * C + h * S;
        float highest = -1e30f, sum = 0.0f;
        for (int u = 0; u <= t; u++) {
          float const* k = qkv + (b * T + u) * 3 * C + C + h * S;
          a[u] = 0.0f;
          for (int i = 0; i < S; i++) a[u] += q[i] * k[i] * scale;
          if (a[u] > highest) highest = a[u];
        }
        for (int u = 0; u <= t; u++) sum += a[u] = expf(a[u] - highest);
        for (int i = 0; i < S; i++) o[i] = 0.0f;
        for (int u = 0; u <= t; u++) {
          float const* v = qkv + (b * T + u) * 3 * C + 2 * C + h * S;
          a[u] /= sum;
          for (int i = 0; i < S; i++) o[i] += a[u] * v[i];
        }
      }
}
static void attention_backward(float* dqkv, float const* dout, float const* qkv, float const* att, int B, int T, int C,
                               int H) {
  int const S = C / H;
  float const scale = 1.0f / sqrtf((float)S);
  float da[TIME];
  for (int b = 0; b < B; b++)
    for (int h = 0; h < H; h++)
      for (int t = 0; t < T; t++) {
        int const at = (b * T + t) * 3 * C + h * S;
        float const *a = att + ((b * H + h) * T + t) * T, *d = dout + (b * T + t) * C + h * S;
        float sum = 0.0f;
        for (int u = 0; u <= t; u++) {
          int const other = (b * T + u) * 3 * C + 2 * C + h * S;
          da[u] = 0.0f;
          for (int i = 0; i < S; i++) {
            da[u] += qkv[other + i] * d[i];
            dqkv[other + i] += a[u] * d[i];
          }
          sum += a[u] * da[u];
        }
        for (int u = 0; u <= t; u++) {
          int const other = (b * T + u) * 3 * C + C + h * S;
          float const ds = a[u] * (da[u] - sum) * scale;
          for (int i = 0; i < S; i++) {
            dqkv[at + i] += ds * qkv[other + i];
            dqkv[other + i] += ds * qkv[at + i];
          }
        }
      }
}

static void gelu_forward(float* out, float const* in, int count) {
  for (int i = 0; i < count; i++) {
    float const x = in[i];
    out[i] = 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
  }
}
static void gelu_backward(float* din, float const* in, float const* dout, int count) {
  for (int i = 0; i < count; i++) {
    float const x = in[i], t = tanhf(0.79788456f * (x + 0.044715f * x * x * x));
    din[i] +=
        dout[i] * (0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.79788456f * (1.0f + 3.0f * 0.044715f * x * x));
  }
}

static void add(float* out, float const* one, float const* other, int count) {
  for (int i = 0; i < count; i++) out[i] = one[i] + other[i];
}

// The model.

static float* point(float** tensors[], size_t const* sizes, int count, size_t* total) {
  *total = 0;
  for (int i = 0; i < count; i++) *total += sizes[i];
  float *memory = (float*)allocate(*total, sizeof(float)), *at = memory;
  for (int i = 0; i < count; i++) {
    *tensors[i] = at;
    at += sizes[i];
  }
  return memory;
}
static float* point_parameters(Parameters* p, size_t const* sizes, size_t* total) {
  float** tensors[TENSORS] = {&p->wte,  &p->wpe,  &p->ln1w, &p->ln1b, &p->qkvw, &p->qkvb, &p->projw, &p->projb,
                              &p->ln2w, &p->ln2b, &p->fcw,  &p->fcb,  &p->outw, &p->outb, &p->lnfw,  &p->lnfb};
  return point(tensors, sizes, TENSORS, total);
}
static float* point_activations(Activations* a, Config const* config, int B, size_t* total) {
  size_t const L = (size_t)config->layers, C = (size_t)config->channels, V = (size_t)config->vocabulary;
  size_t const H = (size_t)config->heads, rows = (size_t)B * TIME, x = rows * C;
  size_t const sizes[ACTIVATIONS] = {(L + 1) * x, L * x, L * rows * 2, L * x * 3,    L * rows * H * TIME,
                                     L * x,       L * x, L * x,        L * rows * 2, L * x * 4,
                                     L * x * 4,   x,     rows * 2,     rows * V};
  float** tensors[ACTIVATIONS] = {&a->x,   &a->ln1,  &a->ln1s, &a->qkv,  &a->att, &a->mix,  &a->mid,
                                  &a->ln2, &a->ln2s, &a->fc,   &a->gelu, &a->lnf, &a->lnfs, &a->probs};
  return point(tensors, sizes, ACTIVATIONS, total);
}

static void model_sizes(Model* model) {
  size_t const V = (size_t)model->config.vocabulary, M = (size_t)model->config.max_time;
  size_t const C = (size_t)model->config.channels, LC = (size_t)model->config.layers * C;
  size_t const sizes[TENSORS] = {V * C, M * C, LC,         LC,     3 * LC * C, 3 * LC, LC * C, LC,
                                 LC,    LC,    4 * LC * C, 4 * LC, 4 * LC * C, LC,     C,      C};
  memcpy(model->sizes, sizes, sizeof(sizes));
}

enum { HEADER = 8 };  // ints before the weights: a magic number, then the config

static void model_read(Model* model, char const* path, int B) {
  FILE* file = fopen(path, "rb");
  int header[HEADER];
  if (file == NULL || fread(header, sizeof(int), HEADER, file) != HEADER || header[0] != 20261125) {
    fprintf(stderr, "%s: not a checkpoint\n", path);
    exit(1);
  }
  memcpy(&model->config, header + 1, sizeof(Config));
  model_sizes(model);
  model->batch = B;
  model->params_memory = point_parameters(&model->params, model->sizes, &model->parameters);
  if (fread(model->params_memory, sizeof(float), model->parameters, file) != model->parameters) exit(1);
  fclose(file);
  model->grads_memory = point_parameters(&model->grads, model->sizes, &model->parameters);
  model->m_memory = (float*)allocate(model->parameters, sizeof(float));
  model->v_memory = (float*)allocate(model->parameters, sizeof(float));
  model->acts_memory = point_activations(&model->acts, &model->config, B, &model->activations);
  model->grad_acts_memory = point_activations(&model->grad_acts, &model->config, B, &model->activations);
}

static void model_forward(Model* model, int const* inputs, int const* targets) {
  Parameters params = model->params;  // for brevity
  Activations acts = model->acts;
  int const B = model->batch, T = TIME, rows = B * T, H = model->config.heads;
  int const C = model->config.channels, V = model->config.vocabulary, L = model->config.layers;
  model->inputs = inputs;
  model->targets = targets;

  embedding_forward(acts.x, inputs, params.wte, params.wpe, rows, T, C);

  for (int l = 0; l < L; l++) {
    float *x = acts.x + l * rows * C, *y = x + rows * C;
    float *ln1 = acts.ln1 + l * rows * C, *qkv = acts.qkv + l * rows * 3 * C, *mix = acts.mix + l * rows * C;
    float *mid = acts.mid + l * rows * C, *ln2 = acts.ln2 + l * rows * C;
    float *fc = acts.fc + l * rows * 4 * C, *gelu = acts.gelu + l * rows * 4 * C;
    layernorm_forward(ln1, acts.ln1s + l * rows * 2, x, params.ln1w + l * C, params.ln1b + l * C, rows, C);
    matmul_forward(qkv, ln1, params.qkvw + l * 3 * C * C, params.qkvb + l * 3 * C, rows, C, 3 * C);
    attention_forward(mix, acts.att + l * rows * H * T, qkv, B, T, C, H);
    matmul_forward(mid, mix, params.projw + l * C * C, params.projb + l * C, rows, C, C);
    add(mid, mid, x, rows * C);
    layernorm_forward(ln2, acts.ln2s + l * rows * 2, mid, params.ln2w + l * C, params.ln2b + l * C, rows, C);
    matmul_forward(fc, ln2, params.fcw + l * 4 * C * C, params.fcb + l * 4 * C, rows, C, 4 * C);
    gelu_forward(gelu, fc, rows * 4 * C);
    matmul_forward(y, gelu, params.outw + l * 4 * C * C, params.outb + l * C, rows, 4 * C, C);
    add(y, y, mid, rows * C);
  }

  layernorm_forward(acts.lnf, acts.lnfs, acts.x + L * rows * C, params.lnfw, params.lnfb, rows, C);
  matmul_forward(acts.probs, acts.lnf, params.wte, NULL, rows, C, V);

  model->loss = 0.0;
  for (int r = 0; r < rows; r++) {
    float *probs = acts.probs + r * V, highest = probs[0], sum = 0.0f;
    for (int v = 1; v < V; v++) highest = probs[v] > highest ? probs[v] : highest;
    for (int v = 0; v < V; v++) sum += probs[v] = expf(probs[v] - highest);
    for (int v = 0; v < V; v++) probs[v] /= sum;
    model->loss -= log((double)probs[targets[r]]) / rows;
  }
}

static void model_zero_grad(Model* model) {
  memset(model->grads_memory, 0, model->parameters * sizeof(float));
  memset(model->grad_acts_memory, 0, model->activations * sizeof(float));
}

static void model_backward(Model* model) {
  Parameters params = model->params, grads = model->grads;  // for brevity
  Activations acts = model->acts, d = model->grad_acts;
  int const B = model->batch, T = TIME, rows = B * T, H = model->config.heads;
  int const C = model->config.channels, V = model->config.vocabulary, L = model->config.layers;

  float *x = acts.x + L * rows * C, *dx = d.x + L * rows * C;
  for (int i = 0; i < rows * V; i++)
    d.probs[i] = (acts.probs[i] - (i % V == model->targets[i / V] ? 1.0f : 0.0f)) / (float)rows;
  matmul_backward(d.lnf, grads.wte, NULL, d.probs, acts.lnf, params.wte, rows, C, V);
  layernorm_backward(dx, grads.lnfw, grads.lnfb, d.lnf, x, params.lnfw, acts.lnfs, rows, C);

  for (int l = L - 1; l >= 0; l--) {
    float const* dy = dx;
    x -= rows * C, dx -= rows * C;
    float *ln1 = acts.ln1 + l * rows * C, *qkv = acts.qkv + l * rows * 3 * C, *mix = acts.mix + l * rows * C;
    float *mid = acts.mid + l * rows * C, *ln2 = acts.ln2 + l * rows * C;
    float *fc = acts.fc + l * rows * 4 * C, *gelu = acts.gelu + l * rows * 4 * C;
    float *dln1 = d.ln1 + l * rows * C, *dqkv = d.qkv + l * rows * 3 * C, *dmix = d.mix + l * rows * C;
    float *dmid = d.mid + l * rows * C, *dln2 = d.ln2 + l * rows * C;
    float *dfc = d.fc + l * rows * 4 * C, *dgelu = d.gelu + l * rows * 4 * C;
    add(dmid, dmid, dy, rows * C);
    matmul_backward(dgelu, grads.outw + l * 4 * C * C, grads.outb + l * C, dy, gelu, params.outw + l * 4 * C * C, rows,
                    4 * C, C);
    gelu_backward(dfc, fc, dgelu, rows * 4 * C);
    matmul_backward(dln2, grads.fcw + l * 4 * C * C, grads.fcb + l * 4 * C, dfc, ln2, params.fcw + l * 4 * C * C, rows,
                    C, 4 * C);
    layernorm_backward(dmid, grads.ln2w + l * C, grads.ln2b + l * C, dln2, mid, params.ln2w + l * C,
                       acts.ln2s + l * rows * 2, rows, C);
    add(dx, dx, dmid, rows * C);
    matmul_backward(dmix, grads.projw + l * C * C, grads.projb + l * C, dmid, mix, params.projw + l * C * C, rows, C,
                    C);
    attention_backward(dqkv, dmix, qkv, acts.att + l * rows * H * T, B, T, C, H);
    matmul_backward(dln1, grads.qkvw + l * 3 * C * C, grads.qkvb + l * 3 * C, dqkv, ln1, params.qkvw + l * 3 * C * C,
                    rows, C, 3 * C);
    layernorm_backward(dx, grads.ln1w + l * C, grads.ln1b + l * C, dln1, x, params.ln1w + l * C,
                       acts.ln1s + l * rows * 2, rows, C);
  }

  embedding_backward(grads.wte, grads.wpe, d.x, model->inputs, rows, T, C);
}

static void model_update(Model* model, int step, float rate) {  // AdamW
  float const beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, decay = 0.01f;
  float const m_scale = (float)(1.0 / (1.0 - pow(beta1, step))), v_scale = (float)(1.0 / (1.0 - pow(beta2, step)));
  for (size_t i = 0; i < model->parameters; i++) {
    float const g = model->grads_memory[i];
    float const m = model->m_memory[i] = beta1 * model->m_memory[i] + (1.0f - beta1) * g;
    float const v = model->v_memory[i] = beta2 * model->v_memory[i] + (1.0f - beta2) * g * g;
    float const w = model->params_memory[i] * (1.0f - rate * decay);
    model->params_memory[i] = w - rate * m * m_scale / (sqrtf(v * v_scale) + eps);
  }
}

static void model_free(Model* model) {
  free(model->params_memory);
  free(model->grads_memory);
  free(model->m_memory);
  free(model->v_memory);
  free(model->acts_memory);
  free(model->grad_acts_memory);
}

// Text: a token is mostly a function of the one before.
static void make_batch(int* tokens, int count, int vocabulary, int batch) {
  unsigned state = 7919u * (unsigned)batch + 1u;
  int token = batch % vocabulary;
  for (int i = 0; i < count; i++) {
    state = state * 1664525u + 1013904223u;
    token = state >> 29 == 0 ? (int)(state >> 8) % vocabulary : (5 * token + 3) % vocabulary;
    tokens[i] = token;
  }
}

static void make_checkpoint(char const* path) {
  int const header[HEADER] = {20261125, TIME, 67, 3, 4, 48, 0, 0};
  Model model;
  memcpy(&model.config, header + 1, sizeof(Config));
  model_sizes(&model);
  FILE* file = fopen(path, "wb");
  if (file == NULL || fwrite(header, sizeof(int), HEADER, file) != HEADER) exit(1);
  unsigned state = 1;
  for (int tensor = 0; tensor < TENSORS; tensor++)
    for (size_t i = 0; i < model.sizes[tensor]; i++) {
      int const of_layer = tensor >= 2 && tensor < 14 ? (tensor - 2) % 6 : tensor == 14 ? 0 : tensor == 15 ? 1 : 2;
      state = state * 1664525u + 1013904223u;
      float const noise = ((float)(state >> 8) / 8388608.0f - 1.0f) * 0.1f;
      float const value = of_layer == 0 ? 1.0f : of_layer % 2 != 0 ? 0.0f : noise;  // a norm's scale, a bias, a weight
      if (fwrite(&value, sizeof(float), 1, file) != 1) exit(1);
    }
  if (fclose(file) != 0) exit(1);
}

static void train(char const* path, int steps) {
  int const B = BATCH, first = 0;
  Model model;
  model_read(&model, path, B);
  int tokens[BATCH * TIME + 1];
  for (int step = 1; step <= steps; step++) {
    make_batch(tokens, BATCH * TIME + 1, model.config.vocabulary, step);
    model_zero_grad(&model);
    model_forward(&model, tokens + first * TIME, tokens + first * TIME + 1);
    model_backward(&model);
    model_update(&model, step, 3e-3f);
    double const loss = model.loss;
    double validation = 0.0;
    if (step % 10 == 0) {
      make_batch(tokens, BATCH * TIME + 1, model.config.vocabulary, 0);
      model_forward(&model, tokens + first * TIME, tokens + first * TIME + 1);
      validation = model.loss;
    }
    if (step % 5 == 0) printf("step %d: loss %.8f\n", step, loss);
    if (step % 10 == 0) printf("validation: loss %.8f\n", validation);
  }
  model_free(&model);
}

int main(int argc, char** argv) {
  int const steps = argc > 2 ? atoi(argv[2]) : 40;
  if (argc < 2)
    fprintf(stderr, "usage: train_gpt make FILE, or train_gpt FILE [STEPS]\n");
  else if (strcmp(argv[1], "make") == 0)
    make_checkpoint(argv[2]);
  else
    train(argv[1], steps);
  return argc < 2 ? 2 : 0;
}
